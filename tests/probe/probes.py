"""Define the expected results of the kernels of probes.cu, by NVIDIA's manual.

Each probe is a generator of calls, and its docstring states its assumption. All numbers are
integers whose sums are exact in any order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
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


def operand(*shape: int) -> Tensor:
    return integers(*shape, low=-8, high=9, dtype=torch.float16)


# ---- grids -------------------------------------------------------------------------------------


def grids() -> Iterator[Case]:
    """a grid that begins early waits for all grids before it"""
    for blocks, rounds in ((2, 1), (8, 20), (300, 400)):
        number, data = 5, integers(64 * blocks)
        x = data.long()
        for _ in range(number * rounds):
            x = x * (x | 1) + 1 & 0xFFFFFFFF
        yield Case((blocks, number, rounds), data, x.to(torch.int32))


# ---- TMA ---------------------------------------------------------------------------------------

# Columns begin at multiples of 16 bytes: at others an H100 ended with an illegal instruction.

SWIZZLES = {0: 24, 1: 16, 2: 32, 3: 64}  # CUtensorMapSwizzle and columns: 48, 32, 64, 128 bytes
SIZES = (3, 21, 72)  # z, y, x of the tensor in the storage


def tma_source() -> Tensor:
    """Return storage that is larger than the tensor in it and nowhere zero."""
    return integers(3, 24, 80, dtype=torch.int16)


def box_of(source: Tensor, columns: int, at: tuple[int, int, int]) -> Tensor:
    """Return the box of 2 x 16 x columns at x, y, z, zero where there is no tensor."""
    margin = 80
    around = torch.zeros([size + 2 * margin for size in SIZES], dtype=source.dtype)
    z, y, x = SIZES
    around[margin : margin + z, margin : margin + y, margin : margin + x] = source[:z, :y, :x]
    x, y, z = (margin + start for start in at)
    return around[z : z + 2, y : y + 16, x : x + columns]


def swizzled(dense: Tensor, swizzle: int, first: int = 0) -> Tensor:
    """Return a box as it lies in shared memory from pack `first`, of 16 bytes, on."""
    packs = dense.contiguous().view(torch.uint8).view(-1, 16)
    place = first + torch.arange(len(packs))
    result = torch.empty_like(packs)
    result[(place ^ (place >> 3 & (1 << swizzle) - 1)) - first] = packs
    return result.view(dense.dtype).flatten()


def tma_load() -> Iterator[Case]:
    """swizzles go by the address; elements outside are 0, and count"""
    source = tma_source()
    outside = ((-8, -3, -1), (64, 15, 2), (-64, 0, 0), (72, 21, 3), (0, -16, 0))
    for swizzle, columns in SWIZZLES.items():
        for at in ((0, 0, 0), (8, 5, 1), (16, 2, 1), *outside):
            for first in (0, 8 if swizzle < 3 else 64):
                box = swizzled(box_of(source, columns, at), swizzle, first)
                yield Case((swizzle, columns, first, *at), source, box)


def with_boxes(before: Tensor, boxes: Tensor, x: int, y: int, times: int) -> Tensor:
    """Return the tensor of 2 x 13 x 40 in its storage, boxes stored (times = 0) or added to it."""
    after = before.clone()
    for row in range(max(y, 0), min(y + 8, 13)):
        left, right = max(x, 0), min(x + 32, 40)
        values = boxes[:, row - y, left - x : right - x]
        place = after[:, row, left:right]
        place.copy_(place + times * values if times else values)
    return after


def tma_store() -> Iterator[Case]:
    """elements outside stay; blocks add FP32, each element once"""
    boxes = operand(2, 8, 32).float()
    images = torch.cat([swizzled(box, 3) for box in boxes])
    for x, y in ((0, 0), (4, 2), (-4, -2), (20, 9), (40, 0), (0, -8)):
        for blocks, adds in ((1, 0), (8, 1)):
            before = operand(2, 16, 48).float()
            after = with_boxes(before, boxes, x, y, blocks * adds)
            yield Case((x, y, blocks, adds), images, after, before)


# ---- wgmma -------------------------------------------------------------------------------------

A_BYTES, B_BYTES = 1024 * 16, 2048 * 16  # as in probes.cu
K = 64


def image(x: Tensor, size: int, mn_major: bool, leading: int, stride: int) -> Tensor:
    """Return an operand of (m or n) x k in shared memory, with NaN around it."""
    mn, k = torch.arange(len(x))[:, None], torch.arange(K)
    if mn_major:
        place = mn // 64 * leading + k // 8 * stride + k % 8 * 128
        place = place + (mn % 64 // 8 ^ k % 8) * 16 + mn % 8 * 2
    else:
        place = mn // 8 * stride + mn % 8 * 128 + (k // 8 ^ mn % 8) * 16 + k % 8 * 2
    result = torch.full((size // 2,), torch.nan, dtype=x.dtype)
    result[place // 2] = x
    return result


def dumped(d: Tensor) -> Tensor:
    """Return the accumulators of the 128 threads of a warpgroup."""
    thread = torch.arange(128)[:, None]
    i = torch.arange(d.shape[1] // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return d[row, i // 4 * 8 + thread % 4 * 2 + i % 2]


def wgmma_mn_major() -> Iterator[Case]:
    """SBO from 8 k to the next 8, LBO between 64s; steps of 2 SBO"""
    for leading, stride in ((8192, 1024), (16384, 2048), (1024, 2048)):
        for a_mn, b_mn in ((1, 0), (0, 1), (1, 1)):
            a, b = operand(64, K), operand(128, K)
            layouts = [(True, leading, stride) if mn else (False, 16, 1024) for mn in (a_mn, b_mn)]
            images = image(a, A_BYTES, *layouts[0]), image(b, B_BYTES, *layouts[1])
            sums = dumped(a.float() @ b.float().mT) + torch.arange(128.0)[:, None]
            yield Case((a_mn, b_mn, leading, stride), torch.cat(images), sums)


def wgmma_groups() -> Iterator[Case]:
    """wait<1>: the last group is pending, earlier groups are done"""
    pairs = [(operand(64, K), operand(128, K)) for _ in range(3)]
    images = [image(x, len(x) * K * 2, False, 16, 1024) for pair in pairs for x in pair]
    products = [a.float() @ b.float().mT for a, b in pairs]
    expected = torch.cat([dumped(products[0] + products[1]), dumped(products[2])])
    yield Case((), torch.cat(images), expected)


PROBES = {p.__name__: p for p in (grids, tma_load, tma_store, wgmma_mn_major, wgmma_groups)}
