"""Define the expected results of the kernels of blocks.cu, by NVIDIA's manual.

Each probe is a generator of calls, and its docstring states its assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A call of a probe.

    Attributes:
        arguments: the function's arguments behind the two pointers.
        input: the target of the first pointer.
        expected: the target of the second pointer afterwards.
        before: the target of the second pointer before; with None, numbers outside of all results.
    """

    arguments: tuple[int, ...]
    input: Tensor
    expected: Tensor
    before: Tensor | None = None


def integers(
    *shape: int, low: int = 1, high: int = 30_000, dtype: torch.dtype = torch.int32
) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


def words(numbers: Tensor) -> Tensor:
    """Return int64 numbers modulo 2^32, as the 32 bits that a kernel writes."""
    return (numbers & 0xFFFFFFFF).to(torch.int32)


def grids() -> Iterator[Case]:
    """a grid that begins early waits for all grids before it"""
    for blocks, rounds in ((2, 1), (8, 20), (300, 400)):
        number, data = 5, integers(64 * blocks)
        x = data.long()
        for _ in range(number * rounds):
            x = x * (x | 1) + 1 & 0xFFFFFFFF
        yield Case((blocks, number, rounds), data, words(x))


PROBES = (grids,)
