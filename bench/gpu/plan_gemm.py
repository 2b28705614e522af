"""Print how the CUDA gemm would compute gemm_shapes.py's products, and the time predicted for it.

    python bench/gpu/plan_gemm.py
    python bench/gpu/plan_gemm.py --multiprocessors 108 --sm80

Nothing is launched and no GPU is needed. Cycles are computed from figures of data sheets and
guesses (csrc/kernels/gemm/plan/cost.h), not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_ext._library import _C
from workloads.gemm_shapes import planned_products


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--multiprocessors", type=int, default=132, help="132 by default")
    parser.add_argument("--sm80", action="store_true", help="plan for GPUs other than Hopper")
    options = parser.parse_args(argv)
    device = {"multiprocessors": options.multiprocessors, "sm90": not options.sm80}
    for shape in planned_products():
        sizes, fp32 = (shape.m, shape.n, shape.k), shape.out == torch.float32
        plan, cycles = _C.gemm_plan(*sizes, shape.layout, fp32_out=fp32, **device)
        print(f"{shape.name} {shape.layout}: {'x'.join(map(str, sizes))}")
        print(f"    {plan}; {cycles / 1e3:.1f} thousand cycles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
