"""Run every op on small inputs, under compute-sanitizer by `make gpu`.

python tests/support/small_case.py [--device cuda]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys

# An allocation of its own for each tensor: memcheck sees nothing within torch's cache.
if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from amp_ext import _C, ops


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


def small_steps(device: torch.device) -> None:
    """Two updates by each optimizer of vectors, their tails and more than one chunk."""
    sizes = (1, 7, 8, 9, 4095, 16384 + 5)
    steps = [torch.tensor(float(i), device=device) for i in range(len(sizes))]
    rates = {"lr": 0.5, "weight_decay": 0.25}
    betas = {"beta1": 0.5, "beta2": 0.75, "eps": 1.0, "decoupled": True}
    momentum = {"momentum": 0.5, "dampening": 0.0, "nesterov": True}
    for dtype in (torch.float32, torch.bfloat16):
        params, grads, first, second = (
            [torch.ones(n, dtype=dtype, device=device) for n in sizes] for _ in range(4)
        )
        for _ in range(2):
            ops.adam_(params, grads, first, second, steps, **betas, **rates)
            ops.sgd_(params, grads, first, **momentum, **rates)
    assert [step.item() for step in steps] == [4.0 + i for i in range(len(sizes))]


def small_case(device: torch.device) -> None:
    """Every op on short lists of all dtypes, sizes around the vector width, misaligned views."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((), dtype=dtype, device=device)

    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    sizes = (0, 1, 7, 8, 9, 4095, 65537)
    found_inf, inv_scale = zeros(torch.float32), zeros(torch.float32) + 0.5
    for repeats in (1, 40):
        grads = [
            torch.ones(offset + n, dtype=dtype, device=device)[offset:]
            for dtype, n, offset in itertools.product(dtypes, sizes * repeats, (0, 1))
        ]
        ops.unscale_(grads, found_inf, inv_scale)
        halves = [torch.empty_like(grad, dtype=torch.float16) for grad in grads]
        ops.cast_(halves, grads)
        ops.check_finite(grads, found_inf)
        ops.grad_norm(grads, found_inf, inv_scale)
    small_steps(device)
    scale, tracker = zeros(torch.float32) + 4.0, zeros(torch.int32)
    ops.update_scale_(scale, tracker, [found_inf], 2.0, 0.5, 1)
    small_products(device)
    assert found_inf.item() == 0.0
    assert scale.item() == 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    _C.set_gemm_mode("kernel")
    small_case(torch.device(parser.parse_args().device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
