"""The planner's choices for sm_90a, measured plans, and predictions; nothing here is measured."""

from __future__ import annotations

import pytest

import simt_gemm
from executors import SIMT
from gemm_kernel_cases import library
from gemm_plan_cases import FP32, assert_covers, problem, sm90_tiles, tile_of, works
from simt_gemm import (
    GemmArgs,
    GemmPlan,
    MeasuredPlan,
    Sm90Tile,
    describe,
    plan_sm90_with,
    predict,
)

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]


def plan(args: GemmArgs, multiprocessors: int = 132, sm90: bool = True) -> GemmPlan:
    return simt_gemm.plan(library(), args, multiprocessors, sm90=sm90)


def number_of(m: int, n: int) -> int:
    """Return the number of the first tile of this size."""
    return next(i for i, tile in enumerate(sm90_tiles()) if (tile.m, tile.n) == (m, n))


@pytest.mark.parametrize("majors", [(True, True), (True, False), (False, True)])
def test_large_squares(majors: tuple[bool, bool]) -> None:
    """A large tile that two consumers share, and half of what it reads by multicast."""
    for size in (4096, 8192):
        found = plan(problem(size, size, size, majors=majors))
        tile, text = sm90_tiles()[found.tile], describe(library(), found)
        assert found.sm90 and not tile.ping_pong, text
        assert (tile.m, tile.n) in {(128, 256), (256, 128), (128, 224)}, text
        assert found.cluster_m * found.cluster_n == 2, text
        assert found.splits == 1, text


@pytest.mark.parametrize("size", [256, 512, 768])
def test_few_tiles_of_many_steps_are_split(size: int) -> None:
    """The gradient of a small weight over many rows."""
    found = plan(problem(size, size, 65536, majors=(False, True), out=FP32, accumulate=True))
    text = describe(library(), found)
    assert found.splits > 1 and (found.sm90 or size == 256), text  # few tiles: smaller ones
    assert found.units * found.cluster_m * found.cluster_n >= 0.7 * 132, text


def test_a_last_round_is_split() -> None:
    """One tile more than there are multiprocessors, with many steps."""
    found = plan_sm90_with(
        library(), problem(128 * 133, 256, 8192), 132, number_of(128, 256), (1, 1), 132, 8
    )
    assert found is not None
    assert (found.units, found.whole, found.blocks) == (140, 132, 132)
    for columns in (133, 140):
        found = plan(problem(128 * columns, 64, 65536))
        assert found.sm90, describe(library(), found)


def test_a_single_multiprocessor_has_no_clusters() -> None:
    found = plan(problem(4096, 4096, 4096), multiprocessors=1)
    assert (found.cluster_m, found.cluster_n, found.blocks) == (1, 1, 1)


def test_group_of_clusters() -> None:
    """Clusters at work together read about as few rows and columns as a square would."""
    for shape in ((8192, 8192), (2048, 16384), (16384, 2048)):
        found = plan(problem(*shape, 4096))
        work, tile = works(found), tile_of(found)
        together = found.blocks // 2
        rows, columns = (len(work[name][:together].unique()) for name in "mn")
        ideal = 2 * (together * tile[0] * tile[1]) ** 0.5
        assert rows * tile[0] + columns * tile[1] <= 1.5 * ideal, describe(library(), found)


@pytest.mark.parametrize(
    "shape", [(8192, 8192, 8192), (256, 256, 9216), (16, 4096, 4096), (4096, 32000, 4096)]
)
def test_planning_is_cheap(shape: tuple[int, int, int]) -> None:
    """It comes before every launch. The limit is that of an idle machine many times over."""
    times = [
        simt_gemm.plan_microseconds(library(), problem(*shape), 132, True, 200) for _ in range(20)
    ]
    print(f"{min(times):.2f} us")
    assert min(times) < 50


# ---- measured plans ----------------------------------------------------------------------------


def measured(**values: object) -> MeasuredPlan:
    defaults = {"m": 512, "n": 512, "k": 4096, "a_major": 0, "b_major": 1, "out_bytes": 2}
    defaults |= {"cluster_m": 1, "cluster_n": 2, "splits": 1, "group": 1}
    tile = Sm90Tile(256, 128, False)
    return MeasuredPlan(**{**defaults, "accumulate": False, "tile": tile, **values})


def test_nothing_has_been_measured() -> None:
    assert library().functions.simt_gemm_measured_plans() == 0


def test_measured_plans_go_first() -> None:
    args = problem(512, 512, 4096)
    entries = [measured(m=256), measured(group=2, splits=4), measured(group=1)]
    found = simt_gemm.plan_measured(library(), args, 132, entries)
    assert tile_of(found) == (256, 256, 64) and found.cluster_n == 2
    assert (found.group, found.splits, found.whole, found.units) == (2, 4, 0, 16)
    assert_covers(args, found)


@pytest.mark.parametrize(
    "values",
    [
        {"m": 520},
        {"n": 520},
        {"k": 4104},
        {"a_major": 1},
        {"b_major": 0},
        {"out_bytes": 4},
        {"accumulate": True},
        {"tile": Sm90Tile(256, 136, False)},
        {"tile": Sm90Tile(256, 128, True)},
        {"tile": Sm90Tile(128, 224, False)},  # does not serve columns
    ],
)
def test_measured_plans_of_other_products(values: dict[str, object]) -> None:
    args = problem(512, 512, 4096)
    found = simt_gemm.plan_measured(library(), args, 132, [measured(**values)])
    assert bytes(found) == bytes(plan(args))


# ---- predictions -------------------------------------------------------------------------------


def test_prediction() -> None:
    """Of 4096 x 8192 x 512 by clusters of 256 x 256: 512 tiles, 66 at a time."""
    args = problem(4096, 8192, 512, out=FP32)
    found = plan_sm90_with(library(), args, 132, number_of(128, 256), (2, 1))
    assert found is not None
    predicted = predict(library(), args, found, 132)
    assert predicted.waves == 512 / 66
    assert predicted.l2_bytes == 2 * 512 * (4096 * 32 + 8192 * 16)
    compulsory = 2 * 512 * (4096 + 8192) + 4096 * 8192 * 4
    assert predicted.memory_bytes == compulsory  # L2 keeps the operands
    busy = 8 * (256 * 128 * 64 / 2048 * 8)
    assert busy < predicted.cycles < 2.5 * busy
    found.group = 1
    assert predict(library(), args, found, 132).memory_bytes == compulsory


def test_prediction_for_mma_sync() -> None:
    args = problem(4096, 4096, 4096)
    found = plan(args, sm90=False)
    predicted = predict(library(), args, found, 132)
    assert predicted.waves > 1 and predicted.cycles > 4096**3 / 132 / 1024
    assert predict(library(), args, plan(args), 132).cycles < predicted.cycles
