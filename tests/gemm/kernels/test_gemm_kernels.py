"""Test the GEMM kernels as compiled PTX, every instance: shapes, layouts, batches, splits."""

from __future__ import annotations

import itertools

import pytest
import torch

from cases import assert_same, assert_sum_near, integers, normal
from gemm_kernel_cases import (
    BF16,
    CPU,
    FP16,
    FP32,
    MAJORS,
    OUT_TYPES,
    SM80_TILES,
    Product,
    Tile,
    check,
    every_sm80_tile,
    every_tile,
    every_tile_and_majors,
    exact,
    magnitude,
    placed,
    planned,
    product,
    product_for,
    run,
)
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

# ---- shapes ------------------------------------------------------------------------------------

# 65 sizes of each of m, n and k in five combinations with the other sizes, any two of them in about
# 325 different pairs.
SHAPES = [
    (1 + i, 1 + (7 * i + 13 * j) % 65, 1 + (11 * i + 29 * j) % 65)
    for i in range(65)
    for j in range(5)
]


@every_tile_and_majors
def test_tails(tile: Tile, majors: str) -> None:
    """Every tail is right, with few steps along k or with two rounds of the ring."""
    number = tile.number * len(MAJORS) + list(MAJORS).index(majors)
    for i, (m, n, k) in enumerate(SHAPES[number :: len(SM80_TILES) * len(MAJORS)]):
        k += i % 2 * 2 * (tile.stages or 8) * tile.k
        splits = 1 + i % 3
        total = placed(integers((1, m, n), FP32, CPU))
        check(product(majors, m, n, k, aligned=tile.aligned, into=total), tile, splits=splits)
        n += -n % (8 if tile.sm90 else 1)  # TMA stores rows of whole 16 bytes
        gemm = product(majors, m, n, k, OUT_TYPES[i % 3], aligned=tile.aligned)
        check(gemm, tile, splits=splits)


@every_tile_and_majors
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_instance(tile: Tile, dtype: torch.dtype, majors: str) -> None:
    """Every instance computes tiles at every edge, with partial last steps along k."""
    number = tile.number + list(MAJORS).index(majors) + (dtype == BF16)
    sizes = *tile.of(3 if not tile.sm90 else 2, 2), 3 * tile.k + 7
    gemm = product(majors, *sizes, OUT_TYPES[number % 3], dtype=dtype, aligned=tile.aligned)
    check(gemm, tile)


@every_sm80_tile
@pytest.mark.parametrize("seed", range(12))
def test_every_schedule(tile: Tile, seed: int) -> None:
    """Every schedule passes through the ring of stages four times."""
    k = 4 * tile.stages * tile.k - 7
    gemm = product(("nn", "tt")[seed % 2], 20, 30, k, aligned=tile.aligned)
    check(gemm, tile, splits=1 + seed // 2 % 2, schedule=Schedule(seed))


def test_groups() -> None:
    """Rows of tiles are computed together, with fewer in the last group."""
    groups = set()
    for multiprocessors in range(1, 6):
        gemm = product("nn", 5 * 16 - 3, 2 * 128 + 1, 9)
        check(gemm, SM80_TILES[5], schedule=Schedule(1, multiprocessors))
        groups.add(planned(r"groups of (\d+) rows"))
    assert any(5 % group for group in groups), groups


# ---- layouts, batches, sums of products ---------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("batch", "sum_batch"), [(3, False), (4, True)], ids=["batch", "sum"])
def test_batches_and_sums(tile: Tile, batch: int, sum_batch: bool) -> None:
    for steps, splits in itertools.product((1, 3), (1, 3, 2)):
        sizes = 19, 24, steps * tile.k - 3
        gemm = product_for(tile, *sizes, batch=batch, sum_batch=sum_batch)
        check(gemm, tile, splits=splits)


def with_odd_strides(gemm: Product) -> Product:
    """Return the product with meaningless strides for dimensions of size 1."""
    odd = {}
    for name in ("a", "b"):
        t = getattr(gemm, name)
        sizes = zip(t.shape[1:], t.stride()[1:], strict=True)
        odd[name] = t.as_strided(t.shape, (7, *(3 if size == 1 else by for size, by in sizes)))
    return gemm._replace(**odd)


@pytest.mark.parametrize("sm90", [False, True])
def test_strides_of_single_elements_mean_nothing(ptx: Ptx, sm90: bool) -> None:
    for sizes in itertools.product((1, 40), repeat=3):
        check(with_odd_strides(product("nn", *sizes)), sm90=sm90)
        assert ("16-byte" in ptx.plan()) != ptx.plan().startswith("sm90")


# ---- rounding, determinism, economy ------------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("k", "splits"), [(1, 1), (40, 5), (700, 1), (700, 5)])
def test_error_is_that_of_a_sum_in_fp32(tile: Tile, k: int, splits: int) -> None:
    for out_dtype in OUT_TYPES:
        gemm = product_for(tile, 33, 24, k, out_dtype, make=normal, alpha=1 / 3)
        out = run(gemm, tile, splits=splits)
        assert_sum_near(out, exact(gemm), magnitude(gemm), k)


@every_tile
@pytest.mark.parametrize("splits", [1, 4])
def test_results_are_the_same_in_every_schedule(tile: Tile, splits: int) -> None:
    plain = product_for(tile, *tile.of(2, 2), 9 * tile.k, make=normal)
    for gemm in (plain, plain._replace(c=normal(plain.shape, FP32, CPU))):
        results = [
            run(gemm, tile, schedule=Schedule(seed, 2 + seed), splits=splits) for seed in range(6)
        ]
        for result in results:
            assert_same(result, results[0])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_memory_is_moved_16_bytes_at_a_time(ptx: Ptx, dtype: torch.dtype) -> None:
    """Each tile reads its rows of a and columns of b once; the result is stored once."""
    m, n, k = 128, 256, 96
    for majors, out_dtype in itertools.product(MAJORS, OUT_TYPES):
        counted = ptx.cost(run, product(majors, m, n, k, out_dtype, dtype=dtype), SM80_TILES[1])
        assert (counted.launches, counted.blocks) == (1, 2)
        assert counted.bytes_copied == 2 * (128 + 128) * k * 2
        assert counted.bytes_stored == m * n * out_dtype.itemsize
