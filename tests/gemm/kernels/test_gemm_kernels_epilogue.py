"""Test the epilogues of the GEMM kernels as compiled PTX: c, bias, activations, aux."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cases import ACTIVATIONS, CURVED, assert_equal, integers
from gemm_kernel_cases import (
    CPU,
    FP16,
    FP32,
    OUT_TYPES,
    SM80_TILES,
    SM90_TILES,
    Product,
    Tile,
    assert_activated_near,
    check,
    compute,
    every_sm90_tile,
    every_tile,
    every_type,
    exact,
    linear_part,
    placed,
    product_for,
    run,
)
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

SIDES = ("none", "plain", "c", "in-place", "aux")

# One of sm_80 for each of long and short lines and rows of warps, and one of either kind of sm_90a.
SOME_TILES = (*(SM80_TILES[i] for i in (2, 4, 5)), SM90_TILES[0], SM90_TILES[5])
some_tile = pytest.mark.parametrize("tile", SOME_TILES, ids=lambda tile: tile.text[:17])


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
    if side == "plain":
        return gemm
    gemm = gemm._replace(activation="relu", with_aux=side == "aux")
    if side == "c" or (side == "aux" and not tile.sm90):
        gemm = gemm._replace(c=values(gemm, other_dtype), beta=-2.0)
    return gemm


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
        assert_equal(run(nan, tile).out, exact(gemm._replace(c=None)).out)


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


# ---- activations -------------------------------------------------------------------------------


@some_tile
@every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(tile: Tile, dtype: torch.dtype, activation: str) -> None:
    """The activation applies to x before it is rounded into aux."""
    gemm = product_for(tile, 70, 40, 24, dtype, alpha=0.125, activation=activation)
    for with_aux in (False, True):
        results = run(gemm._replace(with_aux=with_aux), tile)
        x = linear_part(gemm)
        assert x.min() < -3 and x.max() > 3
        assert_activated_near(results.out, exact(gemm).out, x)
        if with_aux:
            assert_equal(results.aux, x)


@pytest.mark.parametrize("activation", CURVED)
def test_tails_are_kept(activation: str) -> None:
    """The tails of x * Phi(x) are kept.

    Far out, Phi is exp of a number with a few roundings of 2**-24. Each of them counts as often as
    that number is large. Results are FP32, of exact sums.
    """
    x = torch.arange(-96, 97, dtype=torch.float64) / 8
    logit = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if activation != "silu" else x
    if activation == "gelu":
        phi, exponent = torch.special.erfc(-x / math.sqrt(2)) / 2, x**2 / 2
    else:
        phi, exponent = logit.sigmoid(), logit.abs()
    ones = torch.ones(1, 1, 1, dtype=FP16)
    actual = compute(Product(x.half()[None, :, None], ones, activation=activation)).out
    error = (actual[0, :, 0].double() - x * phi).abs()
    bound = (8 * exponent + 32) * 2.0**-24 * (x * phi).abs() + 2.0**-126
    assert bool((error <= bound).all()), (error / bound).max()
