"""Inputs for the tests of cast_, and its comparison with torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cases import (
    FLOATS,
    all_bit_patterns,
    assert_all_same,
    copies,
    random,
    random_bit_patterns,
    unwritten,
)
from executors import Executor

FP16, BF16, FP32, FP64 = FLOATS
EVERY_PAIR = list(itertools.product(FLOATS, repeat=2))
"""Input, output."""

every_pair = pytest.mark.parametrize(
    ("dtype", "output_dtype"), EVERY_PAIR, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
PAIRS_OF_EACH_KIND = [(FP32, FP16), (BF16, FP32), (FP64, FP16), (FP16, BF16), (FP32, FP32)]


def surroundings(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())


def check(executor: Executor, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Compare the op's writes to the outputs, and to the memory around them, with torch's."""
    expected = copies(outputs)
    for output, source in zip(expected, inputs, strict=True):
        output.copy_(source)
    with unwritten(inputs):
        executor.ops.cast_(outputs, inputs)
    assert_all_same(map(surroundings, outputs), map(surroundings, expected))


def patterns(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return every value of a 16-bit type, or random bits: all exponents, infinities, NaNs."""
    made = all_bit_patterns(dtype) if dtype.itemsize == 2 else random_bit_patterns(70_001, dtype)
    return made.to(device)


def pair(
    executor: Executor, size: int, dtype: torch.dtype, output_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return an output and an input of random values."""
    output, source = (random((size,), kind, executor.device) for kind in (output_dtype, dtype))
    return output, source
