"""Test the epilogues of the GEMM kernels as compiled PTX: c, bias, alpha."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cases import assert_equal, integers
from gemm_kernel_cases import (
    CPU,
    FP32,
    OUT_TYPES,
    SM90_TILES,
    Product,
    Tile,
    check,
    every_sm90_tile,
    every_tile,
    every_type,
    exact,
    placed,
    product_for,
    run,
)
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

SIDES = ("plain", "c", "in-place")


def values(gemm: Product, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    return placed(integers(gemm.shape, dtype, CPU), aligned=aligned)


def with_side(gemm: Product, side: str, tile: Tile, bias_dtype: torch.dtype) -> Product:
    """Return the product with all possible addends beside a second matrix of this kind."""
    other_dtype = gemm.out_dtype if tile.sm90 else bias_dtype
    gemm = gemm._replace(alpha=0.5)
    if side == "in-place":
        return gemm._replace(into=values(gemm, FP32, tile.aligned))
    bias = integers((gemm.shape[-1],), bias_dtype, CPU)
    gemm = gemm._replace(bias=bias)
    return gemm if side == "plain" else gemm._replace(c=values(gemm, other_dtype), beta=-2.0)


@every_tile
@every_type
@pytest.mark.parametrize("side", SIDES)
def test_all_at_once(tile: Tile, dtype: torch.dtype, side: str) -> None:
    """All epilogues work at once on several tiles, by one block or several, whole or in shares."""
    number = SIDES.index(side) + OUT_TYPES.index(dtype)
    for splits in (1, 2):
        sizes = *tile.of(2, 2), 2 * tile.k - 5
        gemm = product_for(tile, *sizes, dtype, batch=1 + number % 2)
        gemm = with_side(gemm, side, tile, OUT_TYPES[(number + splits) % 3])
        schedule = Schedule(number + splits, (2, 5)[number % 2])
        check(gemm, tile, splits=splits, schedule=schedule)


@every_sm90_tile
@every_type
@pytest.mark.parametrize("side", SIDES)
def test_boxes(tile: Tile, dtype: torch.dtype, side: str) -> None:
    """Boxes of many parts of tiles, at edges and inside, pass through the boxes of one block."""
    for seed, sizes in enumerate(((tile.m, tile.n), tile.of(3, 2), tile.of(2, 3))):
        gemm = with_side(product_for(tile, *sizes, tile.k, dtype, batch=2), side, tile, FP32)
        check(gemm, tile, schedule=Schedule(seed, 1))


# ---- c -----------------------------------------------------------------------------------------


@every_type
def test_layouts_of_c_that_tma_knows(dtype: torch.dtype) -> None:
    for tile, gap in itertools.product((SM90_TILES[0], SM90_TILES[5]), (0, 16)):
        wide = placed(integers((6, 75, 40 + gap), dtype, CPU))
        gemm = product_for(tile, 70, 40, tile.k, dtype, batch=3, beta=2.0, c=wide[::2, 5:, gap:])
        check(gemm, tile)
        nan = gemm._replace(c=torch.full_like(gemm.c, float("nan")), beta=0.0)
        assert_equal(run(nan, tile), exact(gemm._replace(c=None)))


@every_sm90_tile
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_memory_system_accumulates(ptx: Ptx, tile: Tile, alpha: float) -> None:
    """The memory system accumulates: the kernel does not read the matrix it adds to."""
    for splits in (1, 3):
        gemm = product_for(tile, *tile.of(2, 2), 3 * tile.k, batch=2, alpha=alpha)
        plain = ptx.cost(check, gemm, tile, splits=splits)
        assert "added to out" not in ptx.plan()
        added = ptx.cost(check, gemm._replace(into=values(gemm, FP32)), tile, splits=splits)
        assert "added to out" in ptx.plan()
        assert added.bytes_copied == plain.bytes_copied
