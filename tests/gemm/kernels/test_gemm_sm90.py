"""Test the pipeline of the sm_90a GEMM kernel as compiled PTX: blocks and shares."""

from __future__ import annotations

import itertools

import pytest
import torch

from amp_ext import ops
from gemm_kernel_cases import (
    FP16,
    OUT_TYPES,
    TYPES,
    Tile,
    check,
    every_sm90_tile,
    placed,
    planned,
    product_for,
)
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

SEEDS = range(6)  # asynchronous copies are early, late and at random by turns
BOX_ROWS = 64  # as in amp_ext::Sm90Tile


@every_sm90_tile
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(tile: Tile, seed: int) -> None:
    """Each block passes through the ring several times on its way through its tiles."""
    for blocks, sizes in ((1, tile.of(2, 3)), (2, tile.of(4, 1))):
        gemm = product_for(tile, *sizes, (7 + seed) * tile.k - 7, OUT_TYPES[seed % 3])
        check(gemm, tile, schedule=Schedule(seed, blocks))
        assert planned(r"(\d+) blocks") == blocks


@every_sm90_tile
@pytest.mark.parametrize("seed", range(3))
def test_a_tile_for_each_way_through_the_ring(tile: Tile, seed: int) -> None:
    """A tile's first step takes the stage of an earlier tile's, of the waiting consumer."""
    for steps in range(2, 9):
        gemm = product_for(tile, *tile.of(3, 1), steps * tile.k)
        check(gemm, tile, schedule=Schedule(seed, 1))


@every_sm90_tile
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_shares_of_unequal_numbers_of_steps(ptx: Ptx, tile: Tile, splits: int) -> None:
    """Each block has one share or several, whose numbers of steps differ."""
    for blocks in (2, 3, 5):
        gemm = product_for(tile, *tile.of(2, 2), 7 * tile.k - 3)
        check(gemm, tile, splits=splits, schedule=Schedule(blocks + splits, blocks))
        assert f" {splits} splits" in ptx.plan()


def test_a_refused_tensor_map_is_not_the_end(ptx: Ptx) -> None:
    """After a refused tensor map torch's library computes the product, and a warning says so."""
    a, b = torch.ones(128, 64, dtype=FP16), torch.ones(64, 256, dtype=FP16)
    ptx.set_sm90(True)
    ptx.refuse_tensor_maps(True)
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="the driver refused a tensor map"):
            result = ops.gemm(a, b)
    finally:
        torch.set_warn_always(False)
        ptx.refuse_tensor_maps(False)
        ptx.set_sm90(False)
    assert (result == 64).all()


def boxes_of(extent: int, tile_extent: int, box: int) -> int:
    """Return how many boxes cover the part of a matrix's extent that tiles cover."""
    whole, rest = divmod(extent, tile_extent)
    return whole * (tile_extent // box) + -(-rest // box)


@every_sm90_tile
def test_memory_is_moved_as_planned(ptx: Ptx, tile: Tile) -> None:
    """Each block fetches its own boxes, stores boxes with elements, and stores its shares' sums.

    Plain results have boxes with rows of 128 bytes.
    """
    m, n = tile.of(2, 2)
    steps, dtype = 3, TYPES[tile.majors]
    step_bytes = (tile.m + tile.n) * tile.k * 2
    for splits, c in itertools.product((1, 2), (None, placed(torch.ones(1, m, n, dtype=dtype)))):
        gemm = product_for(tile, m, n, steps * tile.k, dtype, c=c)
        counted = ptx.cost(check, gemm, tile, splits=splits)
        assert (counted.launches, counted.blocks) == (1, planned(r"(\d+) blocks"))
        tiles = planned(r"(\d+)x\d+ tiles") * planned(r"\d+x(\d+) tiles")
        columns = 64 if c is None else 32
        boxes = boxes_of(m, tile.m, BOX_ROWS) * boxes_of(n, tile.n, columns)
        box_bytes = BOX_ROWS * columns * 2
        moved = tiles * steps * step_bytes + (1 + (c is not None)) * boxes * box_bytes
        assert counted.bytes_copied == moved
        shares = splits * (splits > 1) * -(-m // tile.m) * -(-n // tile.n)
        assert counted.bytes_stored == shares * tile.m * tile.n * 4
