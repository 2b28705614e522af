"""Print how the CUDA gemm would compute gemm_shapes.py's products, and the time predicted for it.

    python bench/gpu/plan_gemm.py
    python bench/gpu/plan_gemm.py --multiprocessors 108 --sm80
    python bench/gpu/plan_gemm.py --grid

Nothing is launched and no GPU is needed. Cycles are computed from figures of data sheets and
guesses (csrc/kernels/gemm/plan/cost.h), not measured. Efficiency is the part of the cycles in which
tensor cores would do the product's multiply-adds at the data sheet's rate: a prediction too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_ext._library import _C
from workloads.gemm_shapes import Shape, grid_shapes, planned_products

# Of FP16 by a multiprocessor, in a cycle: data sheets.
MULTIPLY_ADDS = {"sm80": 1024, "sm90": 2048}


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a product.

    Attributes:
        waves: tiles of 128x256 for each multiprocessor.
        busy: cycles at the rate of the data sheet.
        cycles: all of them.
    """

    shape: Shape
    plan: str
    waves: float
    busy: float
    cycles: float

    @property
    def efficiency(self) -> float:
        return self.busy / self.cycles


def predict(shape: Shape, multiprocessors: int = 132, sm90: bool = True) -> Prediction:
    plan, cycles = _C.gemm_plan(
        *(shape.m, shape.n, shape.k, shape.layout),
        fp32_out=shape.out == torch.float32,
        accumulate=shape.accumulate,
        multiprocessors=multiprocessors,
        sm90=sm90,
    )
    busy = shape.flops / 2 / multiprocessors / MULTIPLY_ADDS["sm90" if sm90 else "sm80"]
    waves = shape.m * shape.n / (128 * 256) / multiprocessors
    return Prediction(shape, plan, waves, busy, cycles)


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
        cycles = f"{x.cycles / 1e3:.1f} thousand cycles, predicted efficiency {x.efficiency:.3f}"
        print(f"    {x.plan}; {cycles}")
    if options.grid:
        asked = [x.efficiency for x in predictions if x.shape.k >= 2048 and x.waves >= 0.5]
        good = sum(e >= 0.85 for e in asked)
        print("Where k >= 2048 and there is half a wave of tiles, predicted efficiency is at least")
        print(f"{min(asked):.3f}, and 0.85 or more for {good} of {len(asked)} products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
