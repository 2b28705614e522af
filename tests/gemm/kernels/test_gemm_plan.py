"""The planner, csrc/kernels/gemm/plan: every plan computes each step of each tile once and fits.

The functions are the kernels' own, compiled for the host; nothing is launched.
"""

from __future__ import annotations

import random

import pytest
import torch

import simt_gemm
from executors import SIMT
from gemm_kernel_cases import library, sm90_tiles, tiles
from simt_gemm import (
    ACTIVATIONS,
    GemmArgs,
    GemmPlan,
    MatrixRef,
    describe,
    plan_sm90_with,
    serves,
    serves_sm90,
)

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

FP32, FP16, BF16, FP64 = range(len(simt_gemm.DTYPES))
CLUSTERS = ((1, 1), (2, 1), (1, 2))
MOST_UNITS = 4000  # of a plan whose units are looked at
SHARED_BYTES = 227 << 10  # that a block may have on sm_90


def matrix(
    rows: int, columns: int, by_rows: bool = True, data: int = 4096, dtype: int = FP16
) -> MatrixRef:
    """Return a dense batch of matrices that nobody reads."""
    strides = (columns, 1) if by_rows else (1, rows)
    return MatrixRef(data, dtype, rows * columns, *strides)


def problem(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    terms: int = 1,
    majors: tuple[bool, bool] = (True, True),
    out: int = FP16,
    accumulate: bool = False,
    **values: object,
) -> GemmArgs:
    """Return a product of dense matrices.

    Args:
        majors: whether the rows of a and of b are contiguous, else their columns.
        out: the number of the result's dtype.
        accumulate: whether it is added to the result.
        values: fields of GemmArgs, and as a__data those of its matrices.
    """
    args = GemmArgs(batch=batch, terms=terms, m=m, n=n, k=k, alpha=1.0)
    args.a, args.b = matrix(m, k, majors[0]), matrix(k, n, majors[1])
    args.out = matrix(m, n, dtype=out)
    if accumulate:
        args.c, args.beta = args.out, 1.0
    for path, value in values.items():
        *owner, name = path.split("__")
        setattr(getattr(args, owner[0]) if owner else args, name, value)
    return args


def small(**values: object) -> GemmArgs:
    return problem(64, 64, 64, **values)


def plan(args: GemmArgs, multiprocessors: int = 132, sm90: bool = True) -> GemmPlan:
    return simt_gemm.plan(library(), args, multiprocessors, sm90=sm90)


def tile_of(found: GemmPlan) -> tuple[int, int, int]:
    """Return m, n and k of a tile; of a cluster of two, of its pair of tiles."""
    if not found.sm90:
        tile = tiles()[found.tile]
        return tile.m, tile.n, tile.k
    tile = sm90_tiles()[found.tile]
    return tile.m * found.cluster_m, tile.n * found.cluster_n, 64


def works(found: GemmPlan) -> dict[str, torch.Tensor]:
    """Return what each unit is, its batch and matrix being small."""
    names = ("tile", "split", "splits", "", "batch", "", "m", "n", "matrix", "", "step", "steps")
    units = simt_gemm.works(library(), found)
    columns = torch.frombuffer(units, dtype=torch.int32).view(-1, len(names)).long().T
    return {name: column for name, column in zip(names, columns, strict=True) if name}


# ---- what holds for every plan -----------------------------------------------------------------


def assert_covers(args: GemmArgs, found: GemmPlan) -> None:
    """Each step of each tile is one unit's, and each tile has a number of its own."""
    text, work = describe(library(), found), works(found)
    tile_m, tile_n, tile_k = tile_of(found)
    assert found.tiles_m * tile_m >= args.m > (found.tiles_m - 1) * tile_m, text
    assert found.tiles_n * tile_n >= args.n > (found.tiles_n - 1) * tile_n, text
    assert found.steps == args.terms * -(-args.k // tile_k), text
    place = (work["batch"] * found.tiles_m + work["m"]) * found.tiles_n + work["n"]
    assert (work["m"] >= 0).all() and (work["m"] < found.tiles_m).all(), text
    assert (work["n"] >= 0).all() and (work["n"] < found.tiles_n).all(), text
    count = args.batch * found.tiles_m * found.tiles_n
    numbers = place * count + work["tile"]  # of pairs
    assert len(place.unique()) == len(work["tile"].unique()) == len(numbers.unique()) == count, text
    assert (work["tile"] < count).all(), text

    whole = work["tile"] < found.whole
    assert whole.sum() == found.whole == int((work["splits"][whole] == 1).sum()), text
    assert (work["splits"][~whole] == found.splits).all(), text
    assert found.units == found.whole + (count - found.whole) * found.splits, text

    begin = (work["matrix"] - work["batch"] * args.terms) * found.term_steps + work["step"]
    assert (work["step"] < found.term_steps).all() and (work["steps"] > 0).all(), text
    order = (place * (found.steps + 1) + begin).argsort(stable=True)
    of, begin, steps = place[order], begin[order], work["steps"][order]
    ends = begin + steps
    is_first = torch.ones_like(of, dtype=torch.bool)
    is_first[1:] = of[1:] != of[:-1]
    assert (begin[is_first] == 0).all() and (ends[is_first.roll(-1)] == found.steps).all(), text
    assert (begin[1:] == ends[:-1])[~is_first[1:]].all(), text
    shared = work["steps"][~whole]
    assert shared.numel() == 0 or shared.max() - shared.min() <= 1, text


def assert_has_room(args: GemmArgs, found: GemmPlan) -> None:
    """The workspace and the tickets are what the kernels' epilogues use."""
    tile_m, tile_n, _ = tile_of(found)
    count = args.batch * found.tiles_m * found.tiles_n - found.whole  # of tiles that are split
    cluster, columns = found.cluster_m * found.cluster_n, found.tiles_n * found.cluster_n
    consumers = sm90_tiles()[found.tile].consumers if found.sm90 else 1
    offset, tickets = count * found.splits * tile_m * tile_n * 4, count * cluster * consumers
    text = describe(library(), found)
    assert (found.column_sums_offset, found.column_tickets) == (offset, tickets), text
    if args.column_sums:
        rows = -(-args.m // 64) if found.sm90 else found.tiles_m
        offset += args.batch * rows * columns * (tile_n // found.cluster_n) * 4
        tickets += columns
    assert (found.workspace_bytes, found.tickets) == (offset, tickets), text
    assert found.column_sums_offset % 16 == 0, text
    assert 1 <= found.group <= found.tiles_m, text


def assert_fits_sm90(args: GemmArgs, found: GemmPlan, multiprocessors: int) -> None:
    """As many stages as there is shared memory for; each cluster has work."""
    tile, text = sm90_tiles()[found.tile], describe(library(), found)
    stage = (tile.m + tile.n) * 64 * 2
    boxes = 2 * found.boxes * 64 * 32 * (4 if args.out.dtype == FP32 else 2)
    assert found.shared_bytes == 3072 + boxes + found.stages * stage <= SHARED_BYTES, text
    assert found.stages >= 3, text
    assert found.stages == 8 or found.shared_bytes + stage > SHARED_BYTES, text
    has_c_or_aux = (args.c.data and not found.reduce) or args.aux.data
    assert found.boxes in ((4,) if has_c_or_aux else (2, 3)), text
    cluster = found.cluster_m * found.cluster_n
    clusters = max(1, multiprocessors // cluster)
    assert found.blocks == cluster * min(found.units, clusters), text


def assert_splits_are_useful(args: GemmArgs, found: GemmPlan, multiprocessors: int) -> None:
    """Where tiles are few, or for those of a last round; no share has few steps."""
    text = describe(library(), found)
    if found.splits == 1:
        return
    assert found.splits <= 64, text
    assert found.steps // found.splits >= (8 if found.sm90 else 4), text
    if not found.sm90:
        assert args.batch * found.tiles_m * found.tiles_n < 2 * multiprocessors, text
        return
    clusters = max(1, multiprocessors // (found.cluster_m * found.cluster_n))
    shared = (found.units - found.whole) // found.splits
    assert found.whole % clusters == 0, text
    assert 0 < 2 * shared <= clusters and shared * found.splits <= clusters, text


def random_size(limit: int, multiple: int = 1) -> int:
    """Return a size, as often small as large, as often odd as a multiple of 8."""
    size = int(2 ** random.uniform(0, limit))
    multiple = random.choice((multiple, 8))
    return -(-size // multiple) * multiple


def random_problem(multiple: int) -> GemmArgs:
    """Return a product of sizes that are multiples, with one of the epilogues."""
    batch, terms = random.choice([(1, 1), (1, 1), (random_size(4), 1), (1, random_size(4)), (3, 5)])
    args = problem(
        *(random_size(limit, multiple) for limit in (12, 12, 14)),
        batch,
        terms,
        majors=(random.random() < 0.5, random.random() < 0.5),
        out=random.choice((FP32, FP16, BF16)),
        accumulate=random.random() < 0.3,
        column_sums=random.choice((None, 4096)),
    )
    if not args.c.data and random.random() < 0.4:
        args.aux, args.derivative = args.out, random.random() < 0.5
    if multiple == 1 and random.random() < 0.2:
        args.a.data += 2
    return args


@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize("part", range(2))
def test_random_problems(part: int, sm90: bool) -> None:
    """The planner's own plans, and those with any tile, cluster and number of splits."""
    random.seed(part)
    checked = 0
    while checked < 1000:
        args = random_problem(8 if sm90 else 1)
        multiprocessors = random.choice([1, 4, 108, 132])
        found = plan(args, multiprocessors, sm90)
        splits = random.randrange(1, 6)
        if sm90:
            assert serves_sm90(library(), args)
            tile, cluster = random.randrange(len(sm90_tiles())), random.choice(CLUSTERS)
            options = tile, cluster, random.randrange(40), splits
            forced = plan_sm90_with(library(), args, multiprocessors, *options)
        else:
            assert not found.sm90
            is_odd = args.a.data % 16 or any(size % 8 for size in (args.m, args.n, args.k))
            assert tiles()[found.tile].aligned or is_odd
            tile = random.randrange(len(tiles()))
            forced = simt_gemm.plan(library(), args, multiprocessors, tile, splits)
        assert_splits_are_useful(args, found, multiprocessors)
        for each in (found, forced):
            if each is None or each.units > MOST_UNITS:
                continue
            checked += 1
            assert_covers(args, each)
            assert_has_room(args, each)
            if each.sm90:
                assert_fits_sm90(args, each, multiprocessors)


@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize(
    "args",
    [
        problem(2**30, 64, 64),
        problem(64, 2**30, 64),
        problem(2048, 2048, 2**20),
        problem(8, 8, 8, terms=2**30),
    ],
)
def test_huge_sizes(args: GemmArgs, sm90: bool) -> None:
    """Nothing overflows."""
    found = plan(args, sm90=sm90)
    m, n, k = tile_of(found)
    count = args.batch * -(-args.m // m) * -(-args.n // n)
    assert found.units == found.whole + (count - found.whole) * found.splits
    assert found.steps == args.terms * -(-args.k // k)
    assert found.blocks == found.units or found.sm90


# ---- choices -----------------------------------------------------------------------------------

LARGE, SM90_LARGE = {(256, 128), (128, 128)}, {(128, 256), (256, 128), (128, 224)}


@pytest.mark.parametrize(
    ("shape", "extents", "is_split"),
    [
        ((8192, 50304, 768), LARGE, False),
        ((768, 3072, 65536), LARGE, True),
        ((1, 4096, 4096), {(16, 128)}, True),
        ((4096, 8, 4096), {(128, 16)}, True),
        ((256, 256, 16384), {(64, 64), (128, 64), (64, 128), (128, 128)}, True),
    ],
)
@pytest.mark.parametrize("majors", [(True, True), (True, False), (False, True)])
def test_choices_for_sm80(
    shape: tuple[int, int, int],
    extents: set[tuple[int, int]],
    is_split: bool,
    majors: tuple[bool, bool],
) -> None:
    """Large tiles where there are many of them; narrow ones and splits for skinny results."""
    found = plan(problem(*shape, majors=majors), 108, sm90=False)
    assert tile_of(found)[:2] in extents, describe(library(), found)
    assert (found.splits > 1) == is_split, describe(library(), found)


def test_small_products_of_a_batch_are_not_split() -> None:
    found = plan(problem(64, 64, 4096, batch=1000), sm90=False)
    assert found.splits == 1 and tile_of(found)[0] == 64


@pytest.mark.parametrize("majors", [(True, True), (True, False), (False, True)])
def test_large_squares_on_sm90(majors: tuple[bool, bool]) -> None:
    """A large cooperative tile, and half of what it reads by multicast."""
    found = plan(problem(4096, 4096, 4096, majors=majors))
    tile, text = sm90_tiles()[found.tile], describe(library(), found)
    assert found.sm90 and not tile.ping_pong and (tile.m, tile.n) in SM90_LARGE, text
    assert found.cluster_m * found.cluster_n == 2 and found.splits == 1, text


def test_the_gradient_of_a_small_weight_is_split() -> None:
    found = plan(problem(512, 512, 65536, majors=(False, True), out=FP32, accumulate=True))
    text = describe(library(), found)
    assert found.sm90 and found.splits > 1, text
    assert found.units * found.cluster_m * found.cluster_n >= 0.7 * 132, text


def test_a_tiny_product_is_for_the_kernel_that_starts_faster() -> None:
    assert serves_sm90(library(), small())
    assert not plan(small()).sm90


def test_a_single_multiprocessor_has_no_clusters() -> None:
    found = plan(problem(4096, 4096, 4096), multiprocessors=1)
    assert (found.cluster_m, found.cluster_n, found.blocks) == (1, 1, 1)


@pytest.mark.parametrize("shape", [(8192, 8192), (2048, 16384), (16384, 2048)])
@pytest.mark.parametrize("sm90", [False, True])
def test_tiles_computed_together_are_about_a_square(shape: tuple[int, int], sm90: bool) -> None:
    """They read few different rows of a and columns of b, which L2 then holds."""
    found = plan(problem(*shape, 4096), sm90=sm90)
    work, (m, n, _) = works(found), tile_of(found)
    together = 132 // (found.cluster_m * found.cluster_n)
    rows, columns = (len(work[name][:together].unique()) for name in "mn")
    assert rows * m + columns * n <= 1.5 * 2 * (together * m * n) ** 0.5, describe(library(), found)


# ---- what the kernels can compute --------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        small(a__dtype=FP32),
        small(b__dtype=BF16),
        small(a__column_stride=2),
        small(b__column_stride=2),
        small(out__column_stride=2),
        small(out__dtype=FP64),
        small(c__data=4096, c__dtype=FP64),
        small(bias__data=4096, bias__dtype=FP64),
        small(aux=matrix(64, 64, by_rows=False)),
        problem(8, 8, 2**31),
        problem(8, 8, 8, terms=2**31),
        problem(8, 8, 2**30, terms=2**10),
        problem(2**30, 2**30, 8),
    ],
)
def test_not_for_sm80(args: GemmArgs) -> None:
    assert not serves(library(), args)
    assert not serves_sm90(library(), args)


OTHER = matrix(64, 64, data=8192)


@pytest.mark.parametrize(
    "args",
    [
        small(a__data=4098),
        small(a__row_stride=65),
        small(a__row_stride=0),
        small(b__row_stride=2**39),
        small(batch=2, a__batch_stride=4),
        small(batch=2, b__batch_stride=-4096),
        small(out__data=4104),
        small(out__row_stride=68),
        small(out__row_stride=56),
        small(batch=2, out__batch_stride=0),
        small(c=matrix(64, 64, dtype=FP32)),
        small(c=matrix(64, 64, by_rows=False)),
        small(c=matrix(64, 64, data=4104)),
        small(aux=matrix(64, 64, dtype=BF16)),
        small(aux=OTHER, c=OTHER),
        problem(8, 8, 0),
        problem(0, 8, 8),
        problem(8, 8, 8, batch=2**16, terms=2**16),
        problem(2**31 - 8, 8, 8),
    ],
)
def test_not_for_sm90(args: GemmArgs) -> None:
    assert serves(library(), args)
    assert not serves_sm90(library(), args)
    assert not plan(args).sm90


@pytest.mark.parametrize(
    "args",
    [
        problem(1, 8, 8, batch=3),
        problem(1, 64, 64, a__row_stride=3, out__row_stride=3),
        small(batch=2, a__batch_stride=0),
        small(a__batch_stride=3, b__batch_stride=5, out__batch_stride=7),
        small(c=OTHER),
        small(aux=OTHER, derivative=True),
        small(b__row_stride=2**38),
    ],
)
def test_for_sm90(args: GemmArgs) -> None:
    assert serves_sm90(library(), args)


@pytest.mark.parametrize(
    ("change", "reduce"),
    [
        ({"alpha": 0.5}, True),
        ({"bias__data": 4096}, True),
        ({"beta": 0.5}, False),
        ({"activation": ACTIVATIONS.index("relu")}, False),
        ({"column_sums": 4096}, False),
        ({"c__data": 8192}, False),
        ({"c__row_stride": 128}, False),
        ({"c__dtype": FP16, "out__dtype": FP16}, False),
    ],
)
def test_what_tma_adds_to_the_result(change: dict[str, object], reduce: bool) -> None:
    found = plan_sm90_with(library(), small(out=FP32, accumulate=True, **change), 132, 0)
    assert found is not None and found.reduce == reduce


def test_contiguous_columns_of_b_need_tiles_of_64() -> None:
    for number, tile in enumerate(sm90_tiles()):
        for by_rows in (True, False):
            found = plan_sm90_with(library(), small(majors=(True, by_rows)), 132, number)
            assert (found is None) == (by_rows and tile.n % 64 != 0)
