"""What the manual says that the kernels of probe.cu must give.

Each probe is a generator of calls, and its docstring says what it assumes. All numbers are integers
whose sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        arguments: what the function takes behind the two pointers.
        input: what the first pointer points to.
        expected: what the second one points to afterwards.
        before: what it points to before; numbers that nothing yields when None.
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

GROUP, PAIR = LANES // 4, 2 * (LANES % 4)  # the row and the column of a lane in a fragment

# ---- warps, memory, barriers -------------------------------------------------------------------


def warp() -> Iterator[Case]:
    """shuffles, ballot, vote and the largest of 32 lanes"""
    value = integers(32)
    ballot = words((value.long() % 2 << LANES).sum())
    for lane, sought in ((5, value[7].item()), (16, -1), (31, value[31].item())):
        shuffled = [value[LANES ^ lane]] * 2 + [value[lane].expand(32)]
        same = [ballot, (value == sought).any(), value.max()]
        columns = [*shuffled, *(number.to(torch.int32).expand(32) for number in same)]
        yield Case((lane, sought), value, torch.stack(columns, 1))


def elect() -> Iterator[Case]:
    """one lane of a warp is elected, always the same"""
    yield Case((), NOTHING, torch.tensor([1, 0, 0], dtype=torch.int32).repeat(64, 1))


def caches() -> Iterator[Case]:
    """streaming and read-only accesses give the data"""
    data = integers(2 * 32 * 3 * 4)
    yield Case((), data, data)


def cp_async() -> Iterator[Case]:
    """a copy of fewer bytes adds zeros; one of none reads nothing"""
    for size in (4, 8, 16):
        data = integers(2, 64, size, high=256, dtype=torch.uint8)
        copied = torch.arange(size) < torch.arange(64)[:, None] % (size + 1)
        yield Case((size,), data, data * copied)


def named_barriers() -> Iterator[Case]:
    """barrier_arrive and barrier_sync hand data over, repeatedly"""
    data = integers(5, 64)
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


def mbarrier_remote() -> Iterator[Case]:
    """arrivals from another block complete a phase, and one alone"""
    for blocks, cluster in ((2, 2), (8, 4)):
        data = integers(blocks // cluster, cluster, 64)
        yield Case((blocks, cluster), data, data + 1)


# ---- clusters, grids, registers ----------------------------------------------------------------


def cluster() -> Iterator[Case]:
    """a block's rank is blockIdx.x % cluster size"""
    for size in (1, 2, 4, 8):
        rank = torch.arange(8, dtype=torch.int32) % size
        yield Case((8, size), NOTHING, torch.stack([rank, torch.full_like(rank, size)], 1))


def shared_address() -> Iterator[Case]:
    """shared memory has one address in a cluster, a multiple of 1024"""
    for size in (1, 2, 4):
        yield Case((8, size), NOTHING, torch.zeros(8, 2, dtype=torch.int32))


def turnstile() -> Iterator[Case]:
    """add_release and wait_acquire order blocks that run at a time"""
    blocks, total = 8, 0
    for block in reversed(range(blocks)):
        total = 3 * total + block
    after = torch.tensor([blocks] + 32 * [total], dtype=torch.int32)
    yield Case((blocks,), NOTHING, after, torch.zeros_like(after))


def dependent_launch() -> Iterator[Case]:
    """griddepcontrol_wait waits for the writes of the kernel before"""
    blocks, steps = 4, 2000
    data = integers(blocks * 64)
    slow = data.long()
    for _ in range(steps):
        slow = (1664525 * slow + 1013904223) & 0xFFFFFFFF
    yield Case((blocks, steps), data, words(torch.cat([slow, slow.flip(0)])))


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


def operand(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return integers(*shape, low=-8, high=9, dtype=dtype)


# ---- matrix fragments --------------------------------------------------------------------------

ROW_OF_LANE = torch.arange(32) ^ 3  # as in probe.cu


def ldmatrix() -> Iterator[Case]:
    """lane l receives elements 2 l and 2 l + 1 of each 8x8 matrix"""
    for transpose in (0, 1):
        for count in (2, 4):
            rows = integers(32, 8, dtype=torch.int16)
            matrices = rows[ROW_OF_LANE[: 8 * count]].view(count, 8, 8)
            matrices = matrices.mT if transpose else matrices
            fragments = matrices.reshape(count, 32, 2).transpose(0, 1)
            yield Case((transpose, count), rows, fragments.contiguous())


def stmatrix() -> Iterator[Case]:
    """the inverse of ldmatrix"""
    for transpose in (0, 1):
        fragments = integers(32, 4, 2, dtype=torch.int16)
        matrices = fragments.transpose(0, 1).reshape(4, 8, 8)
        matrices = matrices.mT if transpose else matrices
        rows = torch.empty(32, 8, dtype=torch.int16)
        rows[ROW_OF_LANE] = matrices.reshape(32, 8)
        yield Case((transpose,), fragments, rows)


def mma() -> Iterator[Case]:
    """the fragments of m16n8k16"""
    for dtype in (torch.float16, torch.bfloat16):
        a, b, d = operand(16, 16, dtype=dtype), operand(16, 8, dtype=dtype), operand(16, 8).float()
        two = torch.arange(2)
        i = torch.arange(4)[:, None]
        a_lanes = a[GROUP[:, None, None] + 8 * (i % 2), PAIR[:, None, None] + 8 * (i // 2) + two]
        i = torch.arange(2)[:, None]
        b_lanes = b[PAIR[:, None, None] + 8 * i + two, GROUP[:, None, None]]
        i = torch.arange(4)
        place = GROUP[:, None] + 8 * (i // 2), PAIR[:, None] + i % 2
        product = a.float() @ b.float() + d
        parts = (part.reshape(32, -1).view(torch.uint8) for part in (d[place], a_lanes, b_lanes))
        input = torch.cat(list(parts), 1)
        yield Case((int(dtype == torch.bfloat16),), input, product[place])


# ---- TMA ---------------------------------------------------------------------------------------

SWIZZLES = {0: 24, 1: 16, 2: 32, 3: 64}  # CUtensorMapSwizzle and columns: 48, 32, 64, 128 bytes
SIZES = (3, 21, 72)  # z, y, x of the tensor in the storage


def tma_source() -> Tensor:
    """Return storage that is larger than the tensor in it and nowhere zero."""
    return integers(3, 24, 80, dtype=torch.int16)


def box_of(
    source: Tensor, columns: int, at: tuple[int, int, int], rows: int = 16, matrices: int = 2
) -> Tensor:
    """Return the box at x, y, z, zero where there is no tensor."""
    margin = 80
    around = torch.zeros([size + 2 * margin for size in SIZES], dtype=source.dtype)
    z, y, x = SIZES
    around[margin : margin + z, margin : margin + y, margin : margin + x] = source[:z, :y, :x]
    x, y, z = (margin + start for start in at)
    return around[z : z + matrices, y : y + rows, x : x + columns]


def swizzled(dense: Tensor, swizzle: int, first: int = 0) -> Tensor:
    """Return a box as it lies in shared memory from pack `first`, of 16 bytes, on."""
    packs = dense.contiguous().view(torch.uint8).view(-1, 16)
    place = first + torch.arange(len(packs))
    result = torch.empty_like(packs)
    result[(place ^ (place >> 3 & (1 << swizzle) - 1)) - first] = packs
    return result.view(dense.dtype).flatten()


def tma_load() -> Iterator[Case]:
    """the layouts of the four swizzles, by the address"""
    source = tma_source()
    for swizzle, columns in SWIZZLES.items():
        for at in ((0, 0, 0), (8, 5, 1), (3, 2, 1)):
            for first in (0, 8) if swizzle < 3 else (0, 64):
                box = swizzled(box_of(source, columns, at), swizzle, first)
                yield Case((swizzle, columns, first, *at), source, box)


def tma_outside() -> Iterator[Case]:
    """what is outside is zero, and counts as bytes"""
    source = tma_source()
    for swizzle, columns in SWIZZLES.items():
        for at in ((-5, -3, -1), (66, 15, 2), (-64, 0, 0), (72, 21, 3), (0, -16, 0)):
            box = swizzled(box_of(source, columns, at), swizzle)
            yield Case((swizzle, columns, *at), source, box)


def mbarrier_bytes() -> Iterator[Case]:
    """TMA's bytes may come before they are expected"""
    source = tma_source()
    never = torch.zeros(8, dtype=torch.int16)
    yield Case((), source, torch.cat([swizzled(box_of(source, 64, (0, 0, 0)), 3), never]))


def stored_boxes() -> tuple[Tensor, Tensor]:
    """Return two boxes, and how they lie in shared memory."""
    boxes = operand(2, 8, 32).float()
    return boxes, torch.cat([swizzled(box, 3) for box in boxes])


def with_boxes(before: Tensor, boxes: Tensor, x: int, y: int, times: int) -> Tensor:
    """Return the tensor of 2 x 13 x 40 in its storage, boxes stored (times = 0) or added to it."""
    after = before.clone()
    for row in range(max(y, 0), min(y + 8, 13)):
        left, right = max(x, 0), min(x + 32, 40)
        values = boxes[:, row - y, left - x : right - x]
        place = after[:, row, left:right]
        place.copy_(place + times * values if times else values)
    return after


CORNERS = [(0, 0), (4, 2), (-3, -2), (20, 9), (40, 0), (0, -8)]


def tma_store() -> Iterator[Case]:
    """what is outside is not stored; read shared memory is free"""
    boxes, images = stored_boxes()
    for x, y in CORNERS:
        before = operand(2, 16, 48).float()
        yield Case((x, y), images, with_boxes(before, boxes, x, y, 0), before)


def tma_reduce() -> Iterator[Case]:
    """blocks add FP32 to one place, each element once"""
    boxes, images = stored_boxes()
    for x, y in CORNERS:
        before = operand(2, 16, 48).float()
        yield Case((x, y, 8), images, with_boxes(before, boxes, x, y, 8), before)


def tma_multicast() -> Iterator[Case]:
    """the same offset and barrier in each block of the mask"""
    source = tma_source()
    boxes = [swizzled(box_of(source, 64, (0, 8 * r, 0), 8, 1), 3) for r in range(2)]
    untouched = torch.tensor([1, 0], dtype=torch.int16).repeat(256)
    for masks in ((3, 3), (2, 1), (1, 2)):
        blocks = [
            boxes[r] if masks[r] >> block & 1 else untouched for block in range(2) for r in range(2)
        ]
        bytes_ = 2048 if masks == (3, 3) else 1024
        yield Case((masks[0] | masks[1] << 8, bytes_), source, torch.cat(blocks))


# ---- wgmma -------------------------------------------------------------------------------------

A_BYTES, B_BYTES = 1024 * 16, 2048 * 16  # as in probe.cu
K = 64


def image(x: Tensor, size: int, mn_major: bool, leading: int, stride: int) -> Tensor:
    """Return an operand of (m or n) x k in shared memory; what it does not cover is NaN."""
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


def wgmma(
    n: int,
    arguments: tuple[int, ...],
    a_layout: tuple[bool, int, int] = (False, 0, 1024),
    b_layout: tuple[bool, int, int] = (False, 0, 1024),
    dtype: torch.dtype = torch.float16,
    accumulate: bool = True,
) -> Case:
    a, b = operand(64, K, dtype=dtype), operand(n, K, dtype=dtype)
    images = image(a, A_BYTES, *a_layout), image(b, B_BYTES, *b_layout)
    before = torch.arange(128.0)[:, None] if accumulate else 0.0
    return Case(arguments, torch.cat(images), dumped(a.float() @ b.float().mT) + before)


def wgmma_k_major() -> Iterator[Case]:
    """SBO from 8 rows to the next 8, no LBO; k16 steps of 32 bytes"""
    for leading, stride in ((0, 1024), (16, 1024), (8192, 2048)):
        layout = (False, leading, stride)
        yield wgmma(128, (leading, stride), layout, layout)


def wgmma_mn_major() -> Iterator[Case]:
    """SBO from 8 k to the next 8, LBO between 64s; steps of 2 SBO"""
    for leading, stride in ((8192, 1024), (16384, 2048), (1024, 2048)):
        for a, b in ((1, 0), (0, 1), (1, 1)):
            layouts = [(True, leading, stride) if mn else (False, 0, 1024) for mn in (a, b)]
            yield wgmma(128, (a, b, leading, stride), *layouts)


def wgmma_sizes() -> Iterator[Case]:
    """the accumulators of each n, FP16 and BF16"""
    for n in (64, 96, 128, 160, 192, 208, 224, 256):
        for dtype in (torch.float16, torch.bfloat16):
            yield wgmma(n, (n, int(dtype == torch.bfloat16)), dtype=dtype)


def wgmma_accumulate() -> Iterator[Case]:
    """the sums before are added to, or ignored even if NaN"""
    for accumulate in (False, True):
        yield wgmma(128, (int(accumulate),), accumulate=accumulate)


def wgmma_groups() -> Iterator[Case]:
    """wait<1>: the last group is pending, those before are done"""
    pairs = [(operand(64, K), operand(64, K)) for _ in range(3)]
    images = [image(x, 64 * K * 2, False, 0, 1024) for pair in pairs for x in pair]
    products = [a.float() @ b.float().mT for a, b in pairs]
    expected = torch.cat([dumped(products[0] + products[1]), dumped(products[2])])
    yield Case((), torch.cat(images), expected)


PROBES = (
    warp,
    elect,
    caches,
    cp_async,
    named_barriers,
    mbarrier_phases,
    mbarrier_order,
    mbarrier_remote,
    cluster,
    shared_address,
    turnstile,
    dependent_launch,
    setmaxnreg,
    ldmatrix,
    stmatrix,
    mma,
    tma_load,
    tma_outside,
    tma_store,
    tma_reduce,
    tma_multicast,
    mbarrier_bytes,
    wgmma_k_major,
    wgmma_mn_major,
    wgmma_sizes,
    wgmma_accumulate,
    wgmma_groups,
)
