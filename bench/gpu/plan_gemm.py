"""Print how the CUDA gemm would compute the products of workloads/gemm_shapes.py, and how fast.

    python bench/gpu/plan_gemm.py
    python bench/gpu/plan_gemm.py --multiprocessors 108 --sm80

Nothing is launched and no GPU is needed. Cycles are computed from figures of data sheets and
guesses (csrc/include/amp_ext/gemm_model_sm90.h), not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from amp_ext._library import _C
from workloads.gemm_shapes import Shape, planned_products

PRODUCTS = 2048  # of Hopper's tensor cores, a cycle and multiprocessor, by the data sheet
WIDE = 32


def lines(shape: Shape, multiprocessors: int, sm90: bool) -> list[str]:
    """The plan of a product and its prediction."""
    fp32 = shape.out == torch.float32
    options = {"fp32_out": fp32, "multiprocessors": multiprocessors, "sm90": sm90}
    found = _C.gemm_plan(shape.m, shape.n, shape.k, shape.layout, **options)
    head = f"{shape.name} {shape.layout}".ljust(WIDE) + f"{shape.m}x{shape.n}x{shape.k}"
    busy = shape.m * shape.n * shape.k / multiprocessors / PRODUCTS / found["cycles"]
    tail = f"; Hopper's tensor cores busy for {busy:.0%}"
    return [head, f"    {found['plan']}", f"    {found['prediction']}{tail}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--multiprocessors", type=int, default=132, help="132 by default")
    parser.add_argument("--sm80", action="store_true", help="plan for GPUs other than Hopper")
    options = parser.parse_args(argv)
    for shape in planned_products():
        print(*lines(shape, options.multiprocessors, not options.sm80), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
