"""tests/simt: Hopper's instructions do what ptx_sm90.cuh and ptx_wgmma.cuh say, in every schedule.

On integers that every sum represents, so that the results are exact.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p

import pytest
import torch
from torch import Tensor

from executors import SIMT
from test_simt_pieces import HALVES, SEEDS, integers, run

pytestmark = pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing)

# CUtensorMapDataType
TYPES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
INVALID_VALUE = 1


class Map(ctypes.Structure):
    """What pieces_sm90.cu makes a tensor map of."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int) for name in ("type", "swizzle")),
        *(("size", c_int * 3), ("strides", c_int * 2), ("box", c_int * 3)),
    ]


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 0) -> Map:
    """Describe a tensor of (z, y, x) with boxes of (x, y, z)."""
    z, y, _ = (stride * tensor.itemsize for stride in tensor.stride())
    return Map(
        *(tensor.data_ptr(), TYPES[tensor.dtype], SWIZZLES[swizzle]),
        *((c_int * 3)(*tensor.shape[::-1]), (c_int * 2)(y, z), (c_int * 3)(*box)),
    )


def box_at(tensor: Tensor, at: tuple[int, ...], box: tuple[int, ...]) -> Tensor:
    """Return the box of (z, y, x) at (x, y, z), zero outside of the tensor."""
    result = torch.zeros(box[::-1], dtype=tensor.dtype)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in box[::-1])).tolist():
        place = [i + j for i, j in zip(index, at[::-1], strict=True)]
        if all(0 <= i < n for i, n in zip(place, tensor.shape, strict=True)):
            result[tuple(index)] = tensor[tuple(place)]
    return result


def swizzled(data: Tensor, swizzle: int) -> Tensor:
    """Return bytes as they lie in shared memory."""
    chunks = torch.arange(len(data) // 16)
    mask = max(swizzle // 16 - 1, 0)
    return data.view(-1, 16)[chunks ^ (chunks >> 3 & mask)].flatten()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(
    ("at", "to"), [((0, 0, 0), (3, 1, 0)), ((-5, 6, 1), (-3, -2, 1)), ((40, -1, -1), (30, 5, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_tma_copies_boxes(
    dtype: torch.dtype, at: tuple[int, ...], to: tuple[int, ...], swizzle: int, seed: int
) -> None:
    """With zeros outside of the tensor it comes from, clipped to the one it goes to."""
    source = torch.randint(1, 100, (3, 9, 48)).to(dtype)
    target = torch.randint(1, 100, (2, 8, 64)).to(dtype)
    box = ((swizzle or 64) // source.itemsize, 8, 2)
    bytes_ = source.itemsize * box[0] * box[1] * box[2]
    raw = torch.zeros(bytes_, dtype=torch.uint8)
    expected = box_at(source, at, box)
    stored = target.clone()
    maps = [tensor_map(tensor, box, swizzle) for tensor in (source, target)]
    run(seed, "copy_box", *maps, raw, bytes_, (c_int * 3)(*at), (c_int * 3)(*to), 0)
    assert torch.equal(raw, swizzled(expected.flatten().view(torch.uint8), swizzle))
    for z, y, x in torch.cartesian_prod(*(torch.arange(n) for n in box[::-1])).tolist():
        place = (z + to[2], y + to[1], x + to[0])
        if all(0 <= i < n for i, n in zip(place, stored.shape, strict=True)):
            stored[place] = expected[z, y, x]
    assert torch.equal(target, stored)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_tma_adds(dtype: torch.dtype, seed: int) -> None:
    source, target = integers(1, 8, 32).to(dtype), integers(1, 8, 32).to(dtype)
    box = (64 // source.itemsize, 8, 1)
    raw = torch.zeros(512, dtype=torch.uint8)
    expected = target.clone()
    expected[..., : box[0]] += 2 * source[..., : box[0]]
    maps = [tensor_map(tensor, box) for tensor in (source, target)]
    run(seed, "copy_box", *maps, raw, 512, (c_int * 3)(), (c_int * 3)(), 1)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast(seed: int) -> None:
    rounds = 5
    rows = torch.randint(0, 1000, (1, 2 * rounds, 32), dtype=torch.int32)
    seen = torch.zeros(rounds, 2, 2, 32, dtype=torch.int32)
    run(seed, "multicast", tensor_map(rows, (32, 1, 1)), seen, rounds)
    assert torch.equal(seen, rows.view(rounds, 1, 2, 32).expand_as(seen))


@pytest.mark.parametrize("majors", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("n", [64, 96, 128, 160, 192, 208, 224, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_wgmma(dtype: torch.dtype, n: int, majors: tuple[int, int]) -> None:
    a, b, d = integers(64, 64).to(dtype), integers(64, n).to(dtype), torch.zeros(64, n)
    a_stored = (a.t() if majors[0] else a).contiguous()[None]
    b_stored = (b if majors[1] else b.t()).contiguous()[None]
    maps = (
        tensor_map(a_stored, (64, 64, 1), 128),
        tensor_map(b_stored, (64, 64 if majors[1] else n, 1), 128),
    )
    run(n % 3, "wgmma", *maps, d, n, int(dtype == torch.bfloat16), *majors)
    assert torch.equal(d, 1 + a.float() @ b.float())


@pytest.mark.parametrize("load", [0, 1])
@pytest.mark.parametrize("store", [0, 1])
def test_stmatrix(load: int, store: int) -> None:
    values = torch.randint(0, 1000, (4, 8, 8), dtype=torch.int16)
    stored = torch.zeros_like(values)
    run(load, "transpose", values, stored, load, store)
    assert torch.equal(stored, values.transpose(1, 2) if load != store else values)


@pytest.mark.parametrize("seed", range(3))
def test_setmaxnreg(seed: int) -> None:
    count = torch.zeros(1, dtype=torch.int32)
    run(seed, "registers", count)
    assert count.item() == 3
