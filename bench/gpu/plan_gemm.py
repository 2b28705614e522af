"""Print how the CUDA gemm would compute gemm_shapes.py's products, and the time predicted for it.

    python bench/gpu/plan_gemm.py
    python bench/gpu/plan_gemm.py --multiprocessors 108 --sm80
    python bench/gpu/plan_gemm.py --grid

Nothing is launched and no GPU is needed. Cycles are computed from figures of data sheets and
guesses (csrc/kernels/gemm/plan/cost.h), not measured. What is called attainable is the fewest
cycles by the same figures, whatever the plan: those of the tensor cores, of the device memory or of
L2, whichever are the most, with the work divided evenly among the multiprocessors, and what comes
before the first step and behind the last one; of results of less than a tile for each, those of
narrower tiles, or of shares that are added up. Efficiency is the attainable part of the predicted
cycles; that of the tensor cores is the part in which they would do the product's multiply-adds at
the data sheet's rate. Both are predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.planner import gemm_plan
from workloads.gemm_shapes import Shape, grid_shapes, planned_products

# Of FP16 by a multiprocessor, in a cycle: data sheets.
MULTIPLY_ADDS = {"sm80": 1024, "sm90": 2048}
GOOD = 0.85


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a product.

    Attributes:
        waves: tiles of 128x256 for each multiprocessor.
        busy: cycles of the tensor cores at the rate of the data sheet.
        least: cycles that are attainable; None where that is not known.
        cycles: all of them.
    """

    shape: Shape
    plan: str
    waves: float
    busy: float
    least: float | None
    cycles: float

    @property
    def efficiency(self) -> float | None:
        return self.least and self.least / self.cycles

    @property
    def of_tensor_cores(self) -> float:
        return self.busy / self.cycles

    def in_words(self) -> str:
        words = f"{self.cycles / 1e3:.1f} thousand cycles, predicted efficiency "
        if self.efficiency:
            words += f"{self.efficiency:.3f}, "
        return f"{words}{self.of_tensor_cores:.3f} of the tensor cores"


def predict(shape: Shape, multiprocessors: int = 132, sm90: bool = True) -> Prediction:
    plan, cycles, least = gemm_plan(
        *(shape.m, shape.n, shape.k, shape.layout),
        fp32_out=shape.out == torch.float32,
        accumulate=shape.accumulate,
        multiprocessors=multiprocessors,
        sm90=sm90,
    )
    busy = shape.flops / 2 / multiprocessors / MULTIPLY_ADDS["sm90" if sm90 else "sm80"]
    waves = shape.m * shape.n / (128 * 256) / multiprocessors
    return Prediction(shape, plan, waves, busy, least, cycles)


def asked(x: Prediction) -> bool:
    """Return whether a product has k >= 2048 and half a wave of tiles."""
    return x.shape.k >= 2048 and x.waves >= 0.5


def summary(what: str, efficiencies: Sequence[float]) -> str:
    good = sum(e >= GOOD for e in efficiencies)
    return (
        f"{what} is at least {min(efficiencies):.3f}, and {GOOD} or more for {good} of "
        f"{len(efficiencies)} products"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--multiprocessors", type=int, default=132, help="132 by default")
    parser.add_argument("--sm80", action="store_true", help="plan for GPUs other than Hopper")
    parser.add_argument("--grid", action="store_true", help="layers of models by numbers of tokens")
    options = parser.parse_args(argv)
    shapes = grid_shapes() if options.grid else planned_products()
    predictions = [predict(s, options.multiprocessors, not options.sm80) for s in shapes]
    for x in predictions:
        sizes = "x".join(map(str, (x.shape.m, x.shape.n, x.shape.k)))
        print(f"{x.shape.name} {x.shape.layout}: {sizes}")
        print(f"    {x.plan}; {x.in_words()}")
    if options.grid:
        of_interest = [x for x in predictions if asked(x)]
        print("Where k >= 2048 and there is half a wave of tiles, predicted")
        if not options.sm80:
            known = [x.efficiency for x in of_interest if x.efficiency is not None]  # not sm_80's
            print(summary("efficiency", known))
        print(summary("efficiency of the tensor cores", [x.of_tensor_cores for x in of_interest]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
