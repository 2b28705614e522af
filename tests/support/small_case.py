"""Run every op on small inputs, under compute-sanitizer by `make gpu`.

python tests/support/small_case.py [--device cuda]
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

# An allocation of its own for each tensor: memcheck sees nothing within torch's cache.
if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from amp_ext import _C, ops, verify


def small_products(device: torch.device) -> None:
    """gemm's kernels on ones: tails, misaligned operands, splits; on Hopper every tile."""
    ones = functools.partial(torch.ones, dtype=torch.float16, device=device)

    def multiply(m: int, n: int, k: int, offset: int = 0) -> None:
        a, b = ones(m * k + offset)[offset:].view(m, k), ones(n, k)
        assert bool((ops.gemm(a, b, trans_b=True, out_dtype=torch.float32) == k).all())

    for shape in ((1, 8, 16), (65, 33, 129, 1), (128, 256, 512), (16, 16, 8192)):
        multiply(*shape)
    if device.type == "cpu":
        return
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for tile in range(_C.gemm_tile_count(sm90=True) if hopper else 0):
        for splits in (1, 2):
            _C.force_gemm_tile(tile, splits)
            multiply(264, 520, 1032)
    _C.force_gemm_tile(None)


def small_case(device: torch.device) -> None:
    """The cases that verify the ops on lists, and products."""
    for name in ops.LIST_OPS:
        for case in getattr(ops, name).cases():
            verify.compare(case, device)
    small_products(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    _C.set_gemm_mode("kernel")
    small_case(torch.device(parser.parse_args().device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
