"""amp_ext/gemm_plan.h: every step of every tile is done once, workspaces suffice, limits hold.

The functions are the kernel's own, compiled for the host; nothing is launched.
"""

from __future__ import annotations

import random

import pytest
import torch

import simt_gemm
from executors import SIMT
from gemm_kernel_cases import library, tiles
from gemm_plan_cases import (
    FP64,
    MOST_UNITS,
    assert_covers,
    problem,
    random_problem,
    works,
)
from simt_gemm import GemmArgs, GemmPlan, MatrixRef, VectorRef, describe, serves

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

FP16 = simt_gemm.DTYPES.index(torch.float16)
INT32_MAX = 2**31 - 1


def plan(args: GemmArgs, multiprocessors: int = 132, **fixed: int) -> GemmPlan:
    return simt_gemm.plan(library(), args, multiprocessors, **fixed)


def assert_has_room(args: GemmArgs, found: GemmPlan) -> None:
    """The workspace and the tickets are what the blocks use, as split.cuh and epilogue.cuh say."""
    tile, work = tiles()[found.tile], works(found)
    count = int(work["tile"].max()) + 1
    offset = tickets = 0
    if found.splits > 1:
        share = int(work["tile"].max()) * found.splits + int(work["split"].max()) + 1
        offset, tickets = share * tile.m * tile.n * 4, count
    assert (found.column_sums_offset, found.column_tickets) == (offset, tickets)
    if args.column_sums:
        row = work["batch"].max() * found.tiles_m + work["m"].max() + 1
        offset += int(row) * found.tiles_n * tile.n * 4
        tickets += found.tiles_n
    assert (found.workspace_bytes, found.tickets) == (offset, tickets)
    assert found.column_sums_offset % 16 == 0
    assert found.units == found.blocks and found.whole == 0


@pytest.mark.parametrize("part", range(10))
def test_random_problems(part: int) -> None:
    """The planner's own plans, and those with any tile and number of splits."""
    random.seed(part)
    checked = 0
    while checked < 1000:
        args = random_problem()
        multiprocessors = random.choice([1, 4, 28, 108, 132])
        found = plan(args, multiprocessors)
        if found.units > MOST_UNITS:
            continue
        checked += 1
        assert_covers(args, found)
        assert_has_room(args, found)
        assert_is_useful(args, found, multiprocessors)
        tile = random.randrange(len(tiles()))
        forced = plan(args, multiprocessors, tile=tile, splits=random.randrange(1, 6))
        if forced.units <= MOST_UNITS:
            assert_covers(args, forced)
            assert_has_room(args, forced)


def assert_is_useful(args: GemmArgs, found: GemmPlan, multiprocessors: int) -> None:
    text = describe(library(), found)
    tile = tiles()[found.tile]
    dense = all(
        (x.row_stride if x.row_stride != 1 else x.column_stride) % 8 == 0
        and (args.batch * args.terms == 1 or x.batch_stride % 8 == 0)
        and x.data % 16 == 0
        for x in (args.a, args.b)
    )
    assert tile.aligned or not dense, text
    if found.splits > 1:
        assert args.batch * found.tiles_m * found.tiles_n < 2 * multiprocessors, text
        assert found.steps // found.splits >= 4, text
        assert found.splits <= 64, text
    assert 1 <= found.group <= found.tiles_m, text
    assert 0 < found.blocks <= INT32_MAX, text


# ---- choices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "extents", "splits"),
    [
        ((4096, 4096, 4096), {(256, 128), (128, 128)}, False),
        ((8192, 50304, 768), {(256, 128), (128, 128)}, False),
        ((768, 3072, 65536), {(256, 128), (128, 128)}, True),
        ((1, 4096, 4096), {(16, 128)}, True),
        ((16, 4096, 11008), {(16, 128)}, True),
        ((4096, 8, 4096), {(128, 16)}, True),
        ((64, 16, 256), {(16, 128), (128, 16), (64, 64)}, True),
        ((256, 256, 16384), {(64, 64), (128, 64), (64, 128), (128, 128)}, True),
    ],
)
def test_choices(shape: tuple[int, int, int], extents: set[tuple[int, int]], splits: bool) -> None:
    """Large tiles where there are many of them; narrow ones and splits for skinny results."""
    for majors in ((True, True), (True, False), (False, True)):
        found = plan(problem(*shape, majors=majors), 108)
        tile = tiles()[found.tile]
        assert (tile.m, tile.n) in extents, describe(library(), found)
        assert splits or found.splits == 1, describe(library(), found)
    if shape[2] > 4000 and splits:
        assert found.splits > 1, describe(library(), found)


def test_many_small_products_are_not_split() -> None:
    found = plan(problem(64, 64, 4096, batch=1000))
    assert found.splits == 1
    assert tiles()[found.tile].m == 64


def footprint(found: GemmPlan, blocks: int) -> int:
    """Return how many rows of a and columns of b the first blocks read."""
    work, tile = works(found), tiles()[found.tile]
    rows, columns = (len(work[name][:blocks].unique()) for name in "mn")
    return rows * tile.m + columns * tile.n


@pytest.mark.parametrize("shape", [(8192, 8192), (2048, 16384), (16384, 2048), (4096, 1024)])
def test_blocks_at_work_together_share_what_they_read(shape: tuple[int, int]) -> None:
    args = problem(*shape, 4096)
    found = plan(args, 108)
    together = footprint(found, 108)
    tile = tiles()[found.tile]
    ideal = 2 * (108 * tile.m * tile.n) ** 0.5  # a square
    assert together <= 1.5 * ideal
    found.group = 1
    assert together <= footprint(found, 108)


def test_description() -> None:
    text = describe(library(), plan(problem(4096, 4096, 4096), 108, tile=0))
    assert text == (
        "tile 256x128x32, 8 warps, 4 stages, 16-byte copies; a k-major, b mn-major; 16x32 tiles, "
        "groups of 8, 1 splits of 128 steps, 512 blocks; 0 bytes, 0 tickets"
    )


# ---- limits ------------------------------------------------------------------------------------


def test_huge_sizes() -> None:
    for args in (
        problem(2**36, 8, 8),
        problem(8, 2**36, 8),
        problem(8, 8, 8, batch=2**31 - 1),
        problem(2**20, 2**20, 2**30),
        problem(8, 8, 8, terms=2**31 - 1),
    ):
        assert serves(library(), args)
        found = plan(args)
        tile = tiles()[found.tile]
        tiles_of_all = args.batch * -(-args.m // tile.m) * -(-args.n // tile.n)
        assert found.blocks == tiles_of_all * found.splits
        assert found.steps == args.terms * -(-args.k // tile.k)


def edited(**values: object) -> GemmArgs:
    args = problem(64, 64, 64)
    for path, value in values.items():
        *owner, name = path.split("__")
        setattr(getattr(args, owner[0]) if owner else args, name, value)
    return args


@pytest.mark.parametrize(
    "args",
    [
        edited(a__dtype=0),
        edited(a__dtype=2),
        edited(a__column_stride=2),
        edited(b__column_stride=2),
        edited(out__column_stride=2),
        edited(out__dtype=FP64),
        edited(out__dtype=FP64, out__data=None),
        edited(c=MatrixRef(4096, FP64, 0, 0, 0)),
        edited(bias=VectorRef(4096, FP64, 0)),
        edited(aux=MatrixRef(4096, FP16, 0, 1, 64)),
        problem(8, 8, 2**31),
        problem(8, 8, 8, terms=2**31),
        problem(8, 8, 2**30, terms=2**10),
        problem(8, 8, 8, batch=2**31),
        problem(2**30, 2**30, 8),
    ],
)
def test_not_served(args: GemmArgs) -> None:
    assert not serves(library(), args)


def test_served() -> None:
    assert serves(library(), edited())
    assert serves(library(), edited(a__row_stride=0, b__row_stride=0))
    assert serves(library(), edited(c=MatrixRef(4096, 0, 7, 5, 3)))


def test_instances_fit_a_multiprocessor() -> None:
    """As gemm_tiles.h asserts them; here once more from the limits of sm_80 and sm_86."""
    for tile in tiles():
        ring = tile.stages * (tile.m + tile.n) * tile.k * 2
        sums = tile.m * tile.n // (32 * tile.warps_m * tile.warps_n)
        assert ring <= 99 << 10
        assert sums <= 128
        assert 32 * tile.warps_m * tile.warps_n <= 1024
