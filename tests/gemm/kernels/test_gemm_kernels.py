"""The GEMM kernel, every instance of it, on tests/simt: shapes, layouts, batches, splits."""

from __future__ import annotations

import itertools

import pytest
import torch

from cases import assert_equal, assert_same, assert_sum_near, normal
from executors import SIMT
from gemm_kernel_cases import (
    BF16,
    FP16,
    FP32,
    MAJORS,
    empty,
    every_tile,
    exact,
    library,
    linear_part,
    plan_of,
    product,
    product_of,
    run,
    tiles,
    with_odd_strides,
)
from simt.library import Schedule
from simt_gemm import describe, launch, serves

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

OUT_TYPES = (FP32, FP16, BF16)
every_majors = pytest.mark.parametrize("majors", MAJORS)
every_type = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


# ---- shapes ------------------------------------------------------------------------------------

# 65 sizes of each of m, n and k in five combinations with those of the others, any two of them in
# about 325 different pairs.
SHAPES = [
    (1 + i, 1 + (7 * i + 13 * j) % 65, 1 + (11 * i + 29 * j) % 65)
    for i in range(65)
    for j in range(5)
]


def test_shapes_are_a_cover() -> None:
    for pair in itertools.combinations(range(3), 2):
        assert len({tuple(shape[i] for i in pair) for shape in SHAPES}) > 300
    for sizes in zip(*SHAPES, strict=True):
        assert set(sizes) == set(range(1, 66))


@every_tile
@every_majors
def test_tails(tile: int, majors: str) -> None:
    """Every tail, with few steps along k or so many that they pass through the ring twice."""
    config, kinds = tiles()[tile], len(tiles()) * len(MAJORS)
    number = tile * len(MAJORS) + list(MAJORS).index(majors)
    for i, (m, n, k) in enumerate(SHAPES[number::kinds]):
        k += i % 2 * 2 * config.stages * config.k
        gemm = product_of(majors, m, n, k, OUT_TYPES[i % 3], aligned=config.aligned)
        run(gemm, tile, splits=1 + i % 3)
        assert_equal(gemm.out, exact(gemm))


@every_tile
@every_type
@every_majors
def test_several_tiles(tile: int, dtype: torch.dtype, majors: str) -> None:
    config = tiles()[tile]
    sizes = 2 * config.m + 3, config.n + 9, 3 * config.k + 1
    gemm = product(*sizes, dtype, majors=MAJORS[majors], aligned=config.aligned)
    run(gemm, tile)
    assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("seed", range(12))
def test_every_schedule(tile: int, seed: int) -> None:
    """The ring of stages is passed through four times."""
    config = tiles()[tile]
    k = 4 * config.stages * config.k - 7
    gemm = product_of(("nn", "tt")[seed % 2], 20, 30, k, aligned=config.aligned)
    run(gemm, tile, 1 + seed // 2 % 2, Schedule(seed, 1 + seed % 3))
    assert_equal(gemm.out, exact(gemm))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_groups(group: int) -> None:
    gemm = product(5 * 16 - 3, 2 * 128 + 1, 9)
    plan = plan_of(gemm, tile=5)
    assert (plan.tiles_m, plan.tiles_n) == (5, 3)
    plan.group = group
    launch(library(), Schedule(group), gemm.args(), plan)
    assert_equal(gemm.out, exact(gemm))


@pytest.mark.parametrize(
    "sizes", [(0, 5, 8), (5, 0, 8), (0, 0, 0), (5, 9, 0), (1, 1, 1), (1, 300, 40), (300, 1, 40)]
)
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("terms", [0, 1, 2])
def test_edges(sizes: tuple[int, int, int], batch: int, terms: int) -> None:
    sums = torch.full((sizes[1],), float("nan"))
    gemm = product(*sizes, batch=batch, terms=terms, bias=torch.ones(sizes[1]), column_sums=sums)
    run(gemm)
    assert_equal(gemm.out, exact(gemm))
    assert_equal(sums, exact(gemm).sum((0, 1)))


# ---- layouts, batches, terms -------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("batch", "terms"), [(3, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("splits", [1, 3])
def test_batches_and_terms(tile: int, batch: int, terms: int, splits: int) -> None:
    config = tiles()[tile]
    sizes = 19, 21, config.k * 2 + 5
    majors = ("nn", "tt")[(tile + batch) % 2]
    gemm = product_of(majors, *sizes, aligned=config.aligned, batch=batch, terms=terms)
    run(gemm, tile, splits)
    assert_equal(gemm.out, exact(gemm))


@pytest.mark.parametrize("shared", ["a", "b", "both"])
@pytest.mark.parametrize("terms", [1, 2])
def test_shared_operands(shared: str, terms: int) -> None:
    gemm = product(30, 20, 70, batch=2, terms=terms)
    a = gemm.a[:1].expand_as(gemm.a) if shared != "b" else gemm.a
    b = gemm.b[:1].expand_as(gemm.b) if shared != "a" else gemm.b
    gemm = gemm._replace(a=a, b=b)
    run(gemm)
    assert_equal(gemm.out, exact(gemm))


@pytest.mark.parametrize("name", ["a", "b"])
@every_majors
def test_expanded_lines(name: str, majors: str) -> None:
    gemm = product(30, 20, 70, majors=MAJORS[majors])
    operand = getattr(gemm, name)
    dim = 1 if operand.stride(2) == 1 else 2
    gemm = gemm._replace(**{name: operand.narrow(dim, 0, 1).expand_as(operand)})
    run(gemm)
    assert_equal(gemm.out, exact(gemm))


def test_strides_of_single_elements_mean_nothing() -> None:
    for sizes in itertools.product((1, 40), repeat=3):
        gemm = with_odd_strides(product(*sizes))
        assert serves(library(), gemm.args())
        run(gemm)
        assert_equal(gemm.out, exact(gemm))


def test_only_aligned_operands_are_copied_16_bytes_at_a_time() -> None:
    for name, offset in itertools.product(("a", "b"), (0, 1)):
        gemm = product(33, 33, 33)
        wide = torch.zeros(1, 33, 65, dtype=FP16) if offset else torch.zeros(1, 33, 64, dtype=FP16)
        view = wide[:, :, :33].copy_(getattr(gemm, name))
        gemm = gemm._replace(**{name: view})
        plan = plan_of(gemm)
        assert tiles()[plan.tile].aligned == (offset == 0)
        assert ("16-byte" in describe(library(), plan)) == (offset == 0)
        run(gemm)
        assert_equal(gemm.out, exact(gemm))


# ---- rounding, determinism, economy ------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("majors", ["nn", "tt"])
@pytest.mark.parametrize("k", [1, 40, 700])
@pytest.mark.parametrize("splits", [1, 5])
def test_error_is_that_of_a_sum_in_fp32(tile: int, majors: str, k: int, splits: int) -> None:
    aligned, out_dtype = tiles()[tile].aligned, OUT_TYPES[tile % 3]
    gemm = product_of(majors, 33, 17, k, out_dtype, aligned=aligned, make=normal, alpha=1 / 3)
    run(gemm, tile, splits)
    assert_sum_near(gemm.out, exact(gemm), linear_part(gemm, magnitude=True), k)


@every_tile
def test_splits_are_the_same_in_every_schedule(tile: int) -> None:
    config, results = tiles()[tile], []
    gemm = product(90, 70, 9 * config.k, make=normal, aligned=config.aligned)
    for seed in range(8):
        again = gemm._replace(out=empty(gemm.out.shape, FP32), column_sums=torch.empty(70))
        run(again, tile, 4, Schedule(seed, 1 + seed))
        results.append((again.out.clone(), again.column_sums))
    for out, column_sums in results:
        assert_same(out, results[0][0])
        assert_same(column_sums, results[0][1])


@every_type
def test_memory_is_moved_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    """Each tile reads its rows of a and columns of b once; the result is stored once."""
    m, n, k = 128, 256, 96
    for majors, out_dtype in itertools.product(MAJORS.values(), OUT_TYPES):
        gemm = product(m, n, k, dtype, out_dtype, majors=majors)
        before = library().counters()
        run(gemm, tile=1)
        counted = library().counters() - before
        assert (counted.launches, counted.blocks) == (1, 2)
        assert counted.bytes_copied == 2 * (128 + 128) * k * 2
        assert counted.bytes_stored == m * n * out_dtype.itemsize
