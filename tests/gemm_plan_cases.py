"""Products that nobody computes, for the planner, and what holds for every plan of one."""

from __future__ import annotations

import random

import torch

import simt_gemm
from gemm_kernel_cases import library, sm90_tiles, tiles
from simt_gemm import GemmArgs, GemmPlan, MatrixRef, describe

FP32, FP16, BF16, FP64 = range(len(simt_gemm.DTYPES))
MOST_UNITS = 4000  # of a plan whose units are looked at


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
    sums: bool = False,
    out: int = FP16,
    accumulate: bool = False,
) -> GemmArgs:
    """Return a product of dense matrices.

    Args:
        majors: whether the rows of a and of b are contiguous, else their columns.
        sums: whether there are column sums.
        out: the number of the result's dtype.
        accumulate: whether it is added to the result.
    """
    args = GemmArgs(batch=batch, terms=terms, m=m, n=n, k=k, alpha=1.0)
    args.a, args.b = matrix(m, k, majors[0]), matrix(k, n, majors[1])
    args.out = matrix(m, n, dtype=out)
    if accumulate:
        args.c, args.beta = args.out, 1.0
    args.column_sums = 4096 if sums else None
    return args


def random_size(limit: int) -> int:
    """Return a size, as often small as large, as often odd as a multiple of 8."""
    size = int(2 ** random.uniform(0, limit))
    return size if random.random() < 0.5 else -(-size // 8) * 8


def random_problem() -> GemmArgs:
    majors = random.random() < 0.5, random.random() < 0.5
    batch, terms = random.choice([(1, 1), (1, 1), (random_size(4), 1), (1, random_size(4)), (3, 5)])
    sizes = [random_size(12), random_size(12), random_size(14)]
    args = problem(*sizes, batch, terms, majors, random.random() < 0.5)
    if random.random() < 0.2:
        args.a.data += 2
    return args


def random_sm90_problem() -> GemmArgs:
    """Return a product that TMA serves, with all kinds of epilogues."""
    majors = random.random() < 0.5, random.random() < 0.5
    batch, terms = random.choice([(1, 1), (1, 1), (random_size(4), 1), (1, random_size(4)), (3, 5)])
    sizes = [-(-random_size(limit) // 8) * 8 for limit in (12, 12, 14)]
    sums = random.random() < 0.3
    args = problem(*sizes, batch, terms, majors, sums, random.randrange(3), random.random() < 0.5)
    if not args.c.data and random.random() < 0.4:
        args.aux = args.out
        args.derivative = random.random() < 0.5
    return args


def tile_of(plan: GemmPlan) -> tuple[int, int, int]:
    """Return the scheduler's tile, m by n by k."""
    if not plan.sm90:
        tile = tiles()[plan.tile]
        return tile.m, tile.n, tile.k
    tile = sm90_tiles()[plan.tile]
    return tile.m * plan.cluster_m, tile.n * plan.cluster_n, 64


def works(plan: GemmPlan) -> dict[str, torch.Tensor]:
    """Return what each unit is, its batch and matrix being small."""
    names = ("tile", "split", "splits", "", "batch", "", "m", "n", "matrix", "", "step", "steps")
    units = simt_gemm.works(library(), plan)
    columns = torch.frombuffer(units, dtype=torch.int32).view(-1, len(names)).long().T
    return {name: column for name, column in zip(names, columns, strict=True) if name}


def assert_covers(args: GemmArgs, plan: GemmPlan) -> None:
    """Each step of each tile is one unit's, and each tile has a number of its own."""
    text, work = describe(library(), plan), works(plan)
    tile_m, tile_n, tile_k = tile_of(plan)
    assert plan.tiles_m * tile_m >= args.m > (plan.tiles_m - 1) * tile_m, text
    assert plan.tiles_n * tile_n >= args.n > (plan.tiles_n - 1) * tile_n, text
    assert plan.steps == args.terms * -(-args.k // tile_k), text
    place = (work["batch"] * plan.tiles_m + work["m"]) * plan.tiles_n + work["n"]
    assert (work["m"] >= 0).all() and (work["m"] < plan.tiles_m).all(), text
    assert (work["n"] >= 0).all() and (work["n"] < plan.tiles_n).all(), text
    count = args.batch * plan.tiles_m * plan.tiles_n
    numbers = place * count + work["tile"]  # of pairs
    assert len(place.unique()) == len(work["tile"].unique()) == len(numbers.unique()) == count, text
    assert (work["tile"] < count).all(), text

    whole = work["tile"] < plan.whole
    assert whole.sum() == plan.whole == int((work["splits"][whole] == 1).sum()), text
    assert (work["splits"][~whole] == plan.splits).all(), text
    assert plan.units == plan.whole + (count - plan.whole) * plan.splits, text

    begin = (work["matrix"] - work["batch"] * args.terms) * plan.term_steps + work["step"]
    assert ((work["step"] < plan.term_steps) | (work["steps"] == 0)).all(), text
    order = (place * (plan.steps + 1) + begin).argsort(stable=True)
    of, begin, steps = place[order], begin[order], work["steps"][order]
    ends = begin + steps
    is_first = torch.ones_like(of, dtype=torch.bool)
    is_first[1:] = of[1:] != of[:-1]
    assert (begin[is_first] == 0).all() and (ends[is_first.roll(-1)] == plan.steps).all(), text
    assert (begin[1:] == ends[:-1])[~is_first[1:]].all(), text
    shared = work["steps"][~whole]
    assert shared.numel() == 0 or shared.max() - shared.min() <= 1, text
