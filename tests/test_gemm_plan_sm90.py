"""amp_ext/gemm_plan_sm90.h: what holds for every plan, and which products there are plans for."""

from __future__ import annotations

import random

import pytest

import simt_gemm
from executors import SIMT
from gemm_kernel_cases import library
from gemm_plan_cases import (
    BF16,
    FP16,
    FP32,
    MOST_UNITS,
    assert_covers,
    matrix,
    problem,
    random_problem,
    random_sm90_problem,
    sm90_tiles,
    tile_of,
    works,
)
from simt_gemm import (
    ACTIVATIONS,
    GemmArgs,
    GemmPlan,
    Sm90Tile,
    VectorRef,
    describe,
    plan_sm90_with,
    serves,
    serves_sm90,
)

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

SHARED_BYTES = 232448  # that a block may have
HEADER_BYTES = 3072
CLUSTERS = [(1, 1), (2, 1), (1, 2)]
BYTES = {FP32: 4, FP16: 2, BF16: 2}


def plan(args: GemmArgs, multiprocessors: int = 132, sm90: bool = True) -> GemmPlan:
    return simt_gemm.plan(library(), args, multiprocessors, sm90=sm90)


def clusters_of(found: GemmPlan, multiprocessors: int) -> int:
    return max(1, multiprocessors // (found.cluster_m * found.cluster_n))


def assert_has_room(args: GemmArgs, found: GemmPlan) -> None:
    """The workspace and the tickets are what the kernel's consumers use."""
    tile, work, text = sm90_tiles()[found.tile], works(found), describe(library(), found)
    cluster = found.cluster_m * found.cluster_n
    offset = tickets = 0
    if found.splits > 1:
        shared = args.batch * found.tiles_m * found.tiles_n - found.whole
        assert shared == int(work["tile"].max()) + 1 - found.whole, text
        offset = shared * found.splits * cluster * tile.m * tile.n * 4
        tickets = shared * cluster * tile.consumers
    assert (found.column_sums_offset, found.column_tickets) == (offset, tickets), text
    if args.column_sums:
        columns = found.tiles_n * found.cluster_n
        offset += args.batch * -(-args.m // 64) * columns * tile.n * 4
        tickets += columns
    assert (found.workspace_bytes, found.tickets) == (offset, tickets), text
    assert found.column_sums_offset % 16 == 0, text


def stage_count(tile: Sm90Tile, boxes: int, element_bytes: int) -> int:
    left = SHARED_BYTES - HEADER_BYTES - 2 * boxes * 64 * 32 * element_bytes
    return min(8, left // ((tile.m + tile.n) * 64 * 2))


def assert_fits(args: GemmArgs, found: GemmPlan, multiprocessors: int) -> None:
    """Of a multiprocessor no more is taken than there is; as many stages as fit."""
    tile, text = sm90_tiles()[found.tile], describe(library(), found)
    element_bytes = BYTES[args.out.dtype]
    assert found.stages == stage_count(tile, found.boxes, element_bytes) >= 3, text
    used = found.stages * (tile.m + tile.n) * 128 + 2 * found.boxes * 64 * 32 * element_bytes
    assert found.shared_bytes == used + HEADER_BYTES <= SHARED_BYTES, text
    staged = (args.c.data and not found.reduce) or (args.aux.data and args.derivative)
    if staged:
        enough = [boxes for boxes in (2, 3, 4) if stage_count(tile, boxes, element_bytes) >= 3]
        assert found.boxes == max(enough), text
    elif args.aux.data:
        assert found.boxes == 4, text
    else:
        costs_none = stage_count(tile, 3, element_bytes) == stage_count(tile, 2, element_bytes)
        assert found.boxes == (3 if costs_none else 2), text
    assert tile.n % 64 == 0 or found.b_major == 0, text
    cluster = found.cluster_m * found.cluster_n
    assert found.blocks == cluster * min(found.units, clusters_of(found, multiprocessors)), text
    assert 1 <= found.group <= found.tiles_m, text


def adds_in_memory(args: GemmArgs) -> bool:
    """Return where the memory system may add to out, as it must be."""
    c, out = args.c, args.out
    strides = [(s, getattr(c, s), getattr(out, s)) for s in ("batch_stride", "row_stride")]
    needed = {"batch_stride": args.batch > 1, "row_stride": args.m > 1}
    return (
        bool(c.data)
        and c.data == out.data
        and c.dtype == out.dtype == FP32
        and all(x == y for s, x, y in strides if needed[s])
        and (args.beta, args.activation, args.derivative) == (1.0, 0, False)
        and not (args.aux.data or args.column_sums)
    )


@pytest.mark.parametrize("part", range(10))
def test_random_problems(part: int) -> None:
    """The planner's own plans, and those with any tile, cluster, whole tiles and splits."""
    random.seed(part)
    checked = 0
    while checked < 1000:
        args = random_sm90_problem()
        assert serves_sm90(library(), args)
        multiprocessors = random.choice([1, 4, 132, 132])
        tile, cluster = random.randrange(len(sm90_tiles())), random.choice(CLUSTERS)
        options = tile, cluster, random.randrange(40), random.randrange(1, 6)
        forced = plan_sm90_with(library(), args, multiprocessors, *options)
        for found in (plan(args, multiprocessors), forced):
            if found is None or found.units > MOST_UNITS:
                continue
            checked += 1
            assert_covers(args, found)
            if found.sm90:
                assert_has_room(args, found)
                assert_fits(args, found, multiprocessors)
                assert found.reduce == adds_in_memory(args)
            if found is not forced:
                assert_is_useful(found, multiprocessors)


def assert_is_useful(found: GemmPlan, multiprocessors: int) -> None:
    """Only the tiles of a last round that is half full at most are split."""
    text = describe(library(), found)
    if not found.sm90 or found.splits == 1:
        return
    clusters = clusters_of(found, multiprocessors)
    shared = (found.units - found.whole) // found.splits
    assert found.whole % clusters == 0, text
    assert 0 < 2 * shared <= clusters and shared * found.splits <= clusters, text
    assert found.steps // found.splits >= 8, text


def test_random_operands() -> None:
    """Whatever TMA does not serve, and all on other GPUs, is for mma.sync."""
    random.seed(0)
    for _ in range(2000):
        args = random_problem()
        assert not plan(args, sm90=False).sm90
        if plan(args).sm90:
            assert serves_sm90(library(), args)


# ---- what is served ----------------------------------------------------------------------------


def edited(base: GemmArgs | None = None, **values: object) -> GemmArgs:
    args = base or problem(64, 64, 64)
    for path, value in values.items():
        *owner, name = path.split("__")
        setattr(getattr(args, owner[0]) if owner else args, name, value)
    return args


OTHER = matrix(64, 64, data=8192)


@pytest.mark.parametrize(
    "args",
    [
        edited(a__data=4098),
        edited(b__data=4104),
        edited(a__row_stride=65),
        edited(a__row_stride=0),
        edited(b__row_stride=56),
        edited(b__row_stride=2**39),
        edited(problem(64, 64, 64, batch=2), a__batch_stride=4),
        edited(problem(64, 64, 64, batch=2), b__batch_stride=-4096),
        edited(out__data=4104),
        edited(out__row_stride=68),
        edited(out__row_stride=56),
        edited(problem(64, 64, 64, batch=2), out__batch_stride=0),
        edited(problem(64, 64, 64, batch=2), out__batch_stride=4100),
        edited(c=matrix(64, 64, dtype=FP32)),
        edited(c=matrix(64, 64, by_rows=False)),
        edited(c=matrix(64, 64, data=4104)),
        edited(aux=matrix(64, 64, dtype=BF16)),
        edited(aux=OTHER, c=OTHER),
        problem(8, 8, 0),
        problem(0, 8, 8),
        problem(8, 0, 8),
        problem(8, 8, 8, batch=0),
        problem(8, 8, 8, terms=0),
        problem(8, 8, 8, batch=2**16, terms=2**16),
        problem(2**31 - 8, 8, 8),
        problem(8, 2**31 - 8, 8),
    ],
)
def test_not_served(args: GemmArgs) -> None:
    assert serves(library(), args)
    assert not serves_sm90(library(), args)
    assert not plan(args).sm90


@pytest.mark.parametrize(
    "args",
    [
        problem(64, 64, 64),
        problem(1, 1, 1),
        problem(1, 8, 8, batch=3),
        edited(problem(1, 64, 64), a__row_stride=3, out__row_stride=3),
        edited(problem(64, 64, 64, batch=2), a__batch_stride=0),
        edited(a__batch_stride=3, b__batch_stride=5, out__batch_stride=7),
        edited(c=OTHER),
        edited(aux=OTHER),
        edited(aux=OTHER, derivative=True),
        edited(b__row_stride=2**38),
    ],
)
def test_served(args: GemmArgs) -> None:
    assert serves_sm90(library(), args)


@pytest.mark.parametrize(
    ("change", "reduce"),
    [
        ({}, True),
        ({"alpha": 0.5}, True),
        ({"bias": VectorRef(4096, FP16, 1)}, True),
        ({"beta": 0.5}, False),
        ({"activation": ACTIVATIONS.index("relu")}, False),
        ({"column_sums": 4096}, False),
        ({"c__data": 8192}, False),
        ({"c__row_stride": 128}, False),
        ({"c__dtype": FP16, "out__dtype": FP16}, False),
    ],
)
def test_who_adds_to_the_result(change: dict[str, object], reduce: bool) -> None:
    args = edited(problem(64, 64, 64, out=FP32, accumulate=True), **change)
    found = plan_sm90_with(library(), args, 132, 0)
    assert found is not None and found.reduce == reduce


def test_tiles_that_do_not_serve() -> None:
    """Columns that are contiguous come by 64; an aux of 32 bits takes boxes from the stages."""
    by_columns, by_rows = problem(512, 512, 512), problem(512, 512, 512, majors=(True, False))
    aux = edited(problem(512, 512, 512, out=FP32), aux=matrix(512, 512, dtype=FP32))
    for number, tile in enumerate(sm90_tiles()):
        assert (plan_sm90_with(library(), by_columns, 132, number) is None) == (tile.n % 64 != 0)
        assert plan_sm90_with(library(), by_rows, 132, number) is not None
        has_room = tile.n % 64 == 0 and stage_count(tile, 4, 4) >= 3
        assert (plan_sm90_with(library(), aux, 132, number) is not None) == has_room


def test_tiles_fit_a_multiprocessor() -> None:
    """As gemm_tiles.h asserts it; here once more from the limits of sm_90."""
    for tile in sm90_tiles():
        sums = tile.m * tile.n // (128 * tile.consumers)
        producer, consumer = (24, 240) if sums >= 160 else (40, 232)
        assert 128 * (producer + 2 * consumer) <= 65536
        assert sums + 40 <= consumer
        assert stage_count(tile, 2, 4) >= 3


def test_huge_sizes() -> None:
    for args in (problem(2**30, 64, 64), problem(64, 2**30, 64), problem(2048, 2048, 2**20)):
        found = plan(args)
        assert found.sm90
        tile = tile_of(found)
        tiles = -(-args.m // tile[0]) * -(-args.n // tile[1])
        assert found.units == found.whole + (tiles - found.whole) * found.splits
        assert found.steps == -(-args.k // 64)
