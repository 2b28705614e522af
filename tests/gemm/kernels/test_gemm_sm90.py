"""The GEMM kernel for sm_90a on tests/simt, every instance: shapes, layouts, the pipeline."""

from __future__ import annotations

import itertools

import pytest
import torch

import simt_gemm
from cases import assert_equal, assert_same, assert_sum_near, normal
from executors import SIMT
from gemm_kernel_cases import (
    BF16,
    FP16,
    MAJORS,
    empty,
    exact,
    library,
    linear_part,
    product,
    run_plan,
    sm90_tiles,
    with_odd_strides,
)
from gemm_sm90_cases import (
    BOX_COLUMNS,
    BOX_ROWS,
    CLUSTERS,
    MOST_BOXES,
    MOST_STAGES,
    OUT_TYPES,
    STEP,
    by_hand,
    every_tile,
    plan_sm90,
    product_for,
    run_sm90,
    shared_bytes,
    tiles_of,
)
from simt.library import Schedule
from test_gemm_kernels import SHAPES

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

SEEDS = range(6)  # asynchronous copies are early, late and at random by turns
ONE_BLOCK = {(1, 1): 1, (2, 1): 2, (1, 2): 2}  # cluster -> the multiprocessors of one


# ---- shapes ------------------------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("majors", MAJORS)
def test_every_instance(tile: int, dtype: torch.dtype, majors: str) -> None:
    """Tiles at every edge, the last steps along k not whole."""
    config, number = sm90_tiles()[tile], list(MAJORS).index(majors) + (dtype == BF16)
    sizes = config.m + 3, config.n + 9, 5 * STEP + 7
    gemm = product(*sizes, dtype, OUT_TYPES[(tile + number) % 3], majors=MAJORS[majors])
    if MAJORS[majors][1] and config.n % 64:
        assert not simt_gemm.plan_sm90_with(library(), gemm.args(), 4, tile)
        return
    run_sm90(gemm, tile, cluster=CLUSTERS[number % 3])
    assert_equal(gemm.out, exact(gemm))


@every_tile
def test_tails(tile: int) -> None:
    """Every tail, with few steps along k or so many that they pass through the ring twice."""
    for i, (m, n, k) in enumerate(SHAPES[tile :: len(sm90_tiles())]):
        k += i % 2 * 2 * MOST_STAGES * STEP
        gemm = product_for(tile, m, n, k, OUT_TYPES[i % 3])
        run_sm90(gemm, tile, cluster=CLUSTERS[i // 2 % 3], splits=1 + i % 4 // 3)
        assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_tiles_outside_of_the_matrix(tile: int, cluster: tuple[int, int]) -> None:
    """The last clusters' second tiles, which only feed the first ones; then they do not exist."""
    for m, n in itertools.product((1, 2, 3), repeat=2):
        if m * n > 4:
            continue
        gemm = product_for(tile, *tiles_of(tile, m, n), 3 * STEP, OUT_TYPES[m % 3])
        run_sm90(gemm, tile, cluster=cluster, splits=1 + (m + n) % 2)
        assert_equal(gemm.out, exact(gemm))


@every_tile
def test_groups(tile: int) -> None:
    gemm = product_for(tile, *tiles_of(tile, 5, 2), 9)
    plan = plan_sm90(gemm, tile)
    assert (plan.tiles_m, plan.tiles_n) == (5, 2)
    for plan.group in (1, 2, 3, 8):
        gemm.out.fill_(float("nan"))
        run_plan(gemm, plan, Schedule(plan.group))
        assert_equal(gemm.out, exact(gemm))


# ---- the pipeline ------------------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(tile: int, seed: int) -> None:
    """One block, or cluster, passes through the ring several times on its way through its tiles."""
    for number in (0, 1):
        cluster = CLUSTERS[(seed + seed // 3 + number) % 3]  # all three of them at each timing
        blocks = (1, 3) if cluster[1] == 1 else (3, 1)
        sizes = tiles_of(tile, blocks[0] * cluster[0] + 1, blocks[1] * cluster[1])
        gemm = product_for(tile, *sizes, (7 + seed) * STEP - 7, OUT_TYPES[seed % 3])
        schedule = Schedule(seed, 1 + seed % 2, ONE_BLOCK[cluster])
        plan = run_sm90(gemm, tile, cluster=cluster, schedule=schedule)
        assert plan.units >= 4
        assert plan.units * plan.steps > 2 * plan.stages
        assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_stages(tile: int, cluster: tuple[int, int]) -> None:
    """Any number of them, with fewer steps and with more."""
    sizes = tiles_of(tile, 1 + cluster[0], 1 + cluster[1])
    for k in (1, 3, 11):
        gemm = product_for(tile, *sizes, k * STEP, FP16)
        plan = plan_sm90(gemm, tile, cluster, multiprocessors=ONE_BLOCK[cluster])
        assert plan.shared_bytes == shared_bytes(plan, FP16, plan.stages, plan.boxes)
        counts = ((stages, 2) for stages in range(2, MOST_STAGES + 1))
        for hand_made in by_hand(plan, FP16, counts):
            gemm.out.fill_(float("nan"))
            run_plan(gemm, hand_made, SIMT.ops.next_schedule())
            assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("out_dtype", OUT_TYPES, ids=["fp32", "fp16", "bf16"])
def test_boxes(tile: int, out_dtype: torch.dtype) -> None:
    """Any number of them, through which several tiles pass."""
    gemm = product_for(tile, *tiles_of(tile, 3, 2), STEP, out_dtype)
    plan = plan_sm90(gemm, tile, multiprocessors=1)
    counts = ((2, boxes) for boxes in range(2, MOST_BOXES + 1))
    for hand_made in by_hand(plan, out_dtype, counts):
        gemm.out.fill_(float("nan"))
        run_plan(gemm, hand_made, SIMT.ops.next_schedule())
        assert_equal(gemm.out, exact(gemm))


# ---- layouts, batches, terms -------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("batch", "terms"), [(3, 1), (1, 4), (2, 3)])
def test_batches_and_terms(tile: int, batch: int, terms: int) -> None:
    for steps, (cluster, splits) in itertools.product(
        (1, 3), zip(CLUSTERS, (1, 3, 2), strict=True)
    ):
        gemm = product_for(tile, 19, 21, steps * STEP - 3, batch=batch, terms=terms)
        run_sm90(gemm, tile, cluster=cluster, splits=min(splits, terms * steps))
        assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("shared", ["a", "b", "both"])
def test_shared_operands(tile: int, shared: str) -> None:
    for terms in (1, 2):
        gemm = product_for(tile, 30, 20, 70, batch=2, terms=terms)
        a = gemm.a[:1].expand_as(gemm.a) if shared != "b" else gemm.a
        b = gemm.b[:1].expand_as(gemm.b) if shared != "a" else gemm.b
        gemm = gemm._replace(a=a, b=b)
        run_sm90(gemm, tile)
        assert_equal(gemm.out, exact(gemm))


def test_strides_of_single_elements_mean_nothing() -> None:
    for sizes in itertools.product((1, 40), repeat=3):
        gemm = with_odd_strides(product(*sizes))
        run_sm90(gemm, tile=5)
        assert_equal(gemm.out, exact(gemm))


@every_tile
def test_every_second_matrix(tile: int) -> None:
    """Of batches that are further apart than their matrices are large."""
    gemm = product_for(tile, 70, 41, 70, FP16, batch=5)
    odd = gemm._replace(**{name: getattr(gemm, name)[1::2] for name in ("a", "b", "out")})
    run_sm90(odd, tile)
    assert_equal(gemm.out[1::2], exact(odd))
    assert gemm.out[::2].isnan().all()


@every_tile
def test_operands_that_are_not_finite(tile: int) -> None:
    """They spoil their rows and columns alone, NaN beyond the edges none."""
    m, n = tiles_of(tile, 2, 2)
    gemm = product_for(tile, m, n, STEP + 9)
    gemm.a[0, 3, 5] = float("inf")
    gemm.a[0, m - 1, STEP + 8] = float("nan")
    gemm.b[0, 2, n - 2] = float("-inf")
    run_sm90(gemm, tile, cluster=CLUSTERS[tile % 3])
    assert_equal(gemm.out, exact(gemm))


# ---- shares ------------------------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_shares_behind_whole_tiles(tile: int, splits: int) -> None:
    """Of unequal numbers of steps, of one block's or cluster's tiles or of several ones'."""
    for cluster, whole in itertools.product(CLUSTERS, (0, 1, 3)):
        sizes = tiles_of(tile, 1 + cluster[0], 1 + cluster[1])
        gemm = product_for(tile, *sizes, 7 * STEP - 3)
        schedule = Schedule(whole + splits, 2, 2 + whole)
        plan = run_sm90(gemm, tile, cluster=cluster, whole=whole, splits=splits, schedule=schedule)
        assert (plan.whole, plan.splits, plan.units) == (
            whole,
            splits,
            whole + (4 - whole) * splits,
        )
        assert_equal(gemm.out, exact(gemm))


@every_tile
@pytest.mark.parametrize("splits", [1, 3])
def test_results_are_the_same_in_every_schedule(tile: int, splits: int) -> None:
    n = tiles_of(tile, 2, 2)[1]
    results = []
    for seed in range(8):
        torch.manual_seed(0)
        gemm = product_for(tile, *tiles_of(tile, 3, 2), 5 * STEP, make=normal)
        sums = torch.empty(n)
        gemm = gemm._replace(column_sums=sums)
        schedule = Schedule(seed, 1 + seed, 2 + seed)
        run_sm90(gemm, tile, cluster=CLUSTERS[tile % 3], whole=1, splits=splits, schedule=schedule)
        results.append((gemm.out.clone(), sums))
    for result in results:
        for one, first in zip(result, results[0], strict=True):
            assert_same(one, first)


# ---- rounding, economy -------------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("k", "splits"), [(1, 1), (40, 1), (700, 1), (700, 5)])
def test_error_is_that_of_a_sum_in_fp32(tile: int, k: int, splits: int) -> None:
    for out_dtype in OUT_TYPES:
        gemm = product_for(tile, 33, 17, k, out_dtype, make=normal, alpha=1 / 3)
        run_sm90(gemm, tile, splits=splits)
        assert_sum_near(gemm.out, exact(gemm), linear_part(gemm, magnitude=True), k)


def boxes_of(extent: int, config_extent: int, box: int) -> int:
    """Return how many boxes cover the part of a matrix's extent that tiles cover."""
    whole, rest = divmod(extent, config_extent)
    return whole * (config_extent // box) + -(-rest // box)


@every_tile
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_memory_is_moved_as_planned(tile: int, cluster: tuple[int, int]) -> None:
    """A cluster fetches what its blocks share once; boxes are stored that have elements."""
    config = sm90_tiles()[tile]
    m, n = tiles_of(tile, 1 + cluster[0], 1 + cluster[1])
    steps, box_bytes = 3, BOX_ROWS * BOX_COLUMNS * 2
    boxes = boxes_of(m, config.m, BOX_ROWS) * boxes_of(n, config.n, BOX_COLUMNS)
    step_bytes = (config.m * cluster[0] + config.n * cluster[1]) * STEP * 2
    for splits in (1, 2):
        for c in (False, True):
            gemm = product_for(tile, m, n, steps * STEP, FP16)
            if c:
                gemm = gemm._replace(c=empty(gemm.out.shape, FP16).fill_(2.0))
            before = library().counters()
            plan = run_sm90(gemm, tile, cluster=cluster, splits=splits)
            counted = library().counters() - before
            assert_equal(gemm.out, exact(gemm))
            assert (counted.launches, counted.blocks) == (1, plan.blocks)
            fetched = plan.tiles_m * plan.tiles_n * steps * step_bytes
            assert counted.bytes_copied == fetched + (1 + c) * boxes * box_bytes
            shares = splits * (splits > 1) * -(-m // config.m) * -(-n // config.n)
            assert counted.bytes_stored == shares * config.m * config.n * 4
