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


NOTHING = torch.zeros(1)
LANES = torch.arange(32)

# ---- warps, memory, barriers -------------------------------------------------------------------


def warp() -> Iterator[Case]:
    """shuffles and votes of 32 lanes"""
    value = integers(32)
    for lane, sought in ((5, value[7].item()), (16, -1), (31, value[31].item())):
        found = (value == sought).any().to(torch.int32).expand(32)
        columns = [*[value[LANES ^ lane]] * 2, found]
        yield Case((lane, sought), value, torch.stack(columns, 1))


def elect() -> Iterator[Case]:
    """one lane of a warp is elected, always the same"""
    yield Case((), NOTHING, torch.tensor([1, 0], dtype=torch.int32).repeat(64, 1))


def cp_async() -> Iterator[Case]:
    """a copy of fewer bytes adds zeros; one of none reads nothing"""
    data = integers(2, 64, 16, high=256, dtype=torch.uint8)
    copied = torch.arange(16) < torch.arange(64)[:, None] % 17
    yield Case((), data, data * copied)


def named_barriers() -> Iterator[Case]:
    """each orders the memory of its own threads, repeatedly"""
    data = integers(15, 64)
    yield Case((5,), data, data.flip(1))


def mbarrier_phases() -> Iterator[Case]:
    """fresh, an odd phase is over; n arrivals complete a phase"""
    for arrivals, phases in ((3, 4), (1, 3)):
        seen = torch.zeros(arrivals * phases + 1, dtype=torch.int32)
        seen[-1] = 1
        yield Case((arrivals, phases), NOTHING, seen)


def mbarrier_order() -> Iterator[Case]:
    """arrivals and waits order the shared memory of a block"""
    data = integers(96)
    yield Case((7,), data, data.roll(-33 * 7))


def grids() -> Iterator[Case]:
    """a grid that begins early waits for all grids before it"""
    for blocks, rounds in ((2, 1), (8, 20), (300, 400)):
        number, data = 5, integers(64 * blocks)
        x = data.long()
        for _ in range(number * rounds):
            x = x * (x | 1) + 1 & 0xFFFFFFFF
        yield Case((blocks, number, rounds), data, words(x))


# ---- registers ---------------------------------------------------------------------------------


def setmaxnreg() -> Iterator[Case]:
    """from 168 registers to 40 or 232, and values stay"""
    blocks, packs = 160, 24
    data = integers(384, 2 * packs, 4)
    weights = torch.tensor([1, 5, 7, 11])
    mixed = (data[:, :packs] ^ data[:, packs:].flip(1)).long() @ weights
    block = torch.arange(blocks)[:, None]
    total = block.repeat(1, 384)
    for i in range(packs):
        total = 3 * total + mixed[:, i] & 0xFFFFFFFF
    total[:, :128] = 3 * block + ((data[:128, 0] ^ data[:128, 1]).long() @ weights)
    yield Case((blocks,), data, words(total))


PROBES = (
    warp,
    elect,
    cp_async,
    named_barriers,
    mbarrier_phases,
    mbarrier_order,
    grids,
    setmaxnreg,
)
