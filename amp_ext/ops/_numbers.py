"""Make the tensors of verification cases.

The numbers are such that each kernel returns the reference's bits in any order of summation.
"""

import math
from typing import Any

import torch
from torch import Tensor

CHUNK = 16384
"""Elements that a block of a list kernel takes at once."""
INF, NAN = float("inf"), float("nan")
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (FP32, FP16, BF16, FP64)


def tensor(value: Any, dtype: torch.dtype = FP32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def full(value: float, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def counted(*shape: int) -> Tensor:
    """Return -2, -1, 0, 1, 2, -2 and so on."""
    count = torch.arange(math.prod(shape), dtype=FP32, device="cpu")
    return count.remainder(5).sub(2.0).view(shape)


def integers(*shape: int, limit: int = 8191) -> Tensor:
    """Return random integers, the same ones in each call with a shape."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    kind = {"generator": generator, "dtype": FP64, "device": "cpu"}
    return torch.randint(-limit, limit + 1, shape, **kind)


def numbers(count: int) -> Tensor:
    """Return numbers of 13 bits from 2**-30 to 2**15, and some subnormal ones."""
    values = integers(count) * (integers(count) % 33 - 30).exp2()
    if count > 6:
        values[1:6] = tensor((-0.0, 1e-40, -3e-41, 1e-310, 6e-8), FP64)
    return values


def placed(values: list[Tensor], shift: int = 0) -> list[Tensor]:
    """Return copies in one piece of memory, with different alignments.

    They begin 0 to 3 elements behind multiples of 16 bytes.
    """
    ends = [0]
    starts = []
    for i, value in enumerate(values):
        starts.append(-(-ends[-1] // 16) * 16 + 16 + (i + shift) % 4 * value.itemsize)
        ends.append(starts[-1] + value.nbytes)
    memory = torch.full((ends[-1] + 16,), 42, dtype=torch.uint8, device="cpu")
    return [
        memory[start : start + value.nbytes].view(value.dtype).copy_(value)
        for start, value in zip(starts, values, strict=True)
    ]


def gradients(values: Tensor) -> list[Tensor]:
    """Return a list of each dtype in three sizes."""
    sizes = (CHUNK + 3, 37, 0)
    return placed([values[:size].to(dtype) for dtype in DTYPES for size in sizes])


def with_value(value: float, grads: list[Tensor], index: int, position: int) -> list[Tensor]:
    """Return copies of gradients with a value in one element."""
    copies = placed(grads)
    copies[index][position] = value
    return copies
