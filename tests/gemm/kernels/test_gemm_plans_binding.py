"""Make plans without a GPU (tests/support/planner.py), and force tiles."""

from __future__ import annotations

import re

import pytest

from amp_ext import _C
from planner import Forced, gemm_plan, gemm_tiles


def test_a_plan() -> None:
    plan, cycles = gemm_plan(4096, 4096, 4096, "NT")
    assert re.match(r"sm90 tile \d+x\d+x64, cooperative, [345] stages; a k", plan)
    assert 4096**3 / 132 / 2048 < cycles < 4096**3 / 132 / 1024
    plan, slower = gemm_plan(4096, 4096, 4096, "TN", sm90=False)
    assert "sm90" not in plan and "a mn-major, b mn-major" in plan and slower > cycles
    assert "32 steps" in gemm_plan(4096, 4096, 2048, fp32_out=True).text


def test_a_forced_tile() -> None:
    """A forced tile computes every product that it can, with at most as many splits as steps."""
    forced = Forced(4, splits=2)
    plan = gemm_plan(4096, 4096, 4096, "NT", forced=forced).text
    assert plan.startswith("sm90 tile 64x256x64, ping-pong") and " 2 splits" in plan
    assert "sm90" not in gemm_plan(4096, 4096, 4096, "NT", sm90=False, forced=forced).text
    assert "splits" not in gemm_plan(64, 64, 64, forced=forced).text
    assert "128x192" in gemm_plan(512, 512, 512, "NN", forced=Forced(2)).text


WRONG = (Forced(99), Forced(-1), Forced(0, splits=0), Forced(0, splits=256))


@pytest.mark.parametrize("forced", WRONG)
def test_no_such_tile(forced: Forced) -> None:
    with pytest.raises(ValueError, match="the CUDA gemm has no Forced"):
        _ = forced.variant
    with pytest.raises(ValueError, match=f"the CUDA kernels have no tile {forced.tile} for sm_"):
        _C.force_gemm_tile(*forced)


def test_each_tile_is_there() -> None:
    count = {sm90: len(gemm_tiles(sm90)) for sm90 in (False, True)}
    if _C.cuda_built():
        assert count == {sm90: _C.gemm_tile_count(sm90=sm90) for sm90 in (False, True)}
        assert _C.force_gemm_tile(count[True] - 1, 3) is None
    _C.force_gemm_tile(None)
    every = [Forced(tile, sm90=sm90) for sm90 in count for tile in range(count[sm90])]
    cut = [Forced(0, splits=2), Forced(0, splits=3)]
    assert len({forced.variant for forced in (*every, *cut)}) == len(every) + len(cut)


def test_a_size_that_nothing_computes() -> None:
    with pytest.raises(ValueError, match="the kernels cannot compute 4294967296x4294967296x1"):
        gemm_plan(2**32, 2**32, 1)


# TFLOP/s of tiles by number on an H100, timed in turn.
MEASURED = {
    (4096, 4096, 4096, "NT"): {0: 745, 1: 732, 2: 653, 3: 662},
    (4096, 6144, 4096, "NT"): {0: 655, 1: 647, 2: 645, 3: 633},
    (4096, 3072, 2048, "NT"): {0: 617, 1: 609, 2: 612, 3: 602},
    (12608, 3072, 768, "NT"): {0: 562, 1: 506, 2: 553, 3: 573},
    (12608, 768, 3072, "NN"): {0: 502, 1: 515, 2: 685, 3: 620},
    (2048, 2048, 2048, "NT"): {0: 639, 1: 639, 2: 448, 3: 603},
    (16384, 2048, 4096, "TN"): {0: 636, 1: 585, 2: 617, 3: 616},
}


@pytest.mark.parametrize("product", MEASURED, ids=str)
def test_predictions_are_near_measurements(product: tuple[int, int, int, str]) -> None:
    """Predicted rates are within 12% of an H100's, and the choice is nearly its fastest."""
    m, n, k, layout = product
    options = {"fp32_out": layout == "TN"}
    rates = MEASURED[product]
    for tile, rate in rates.items():
        cycles = gemm_plan(m, n, k, layout, **options, forced=Forced(tile)).cycles
        predicted = 2 * m * n * k / (cycles / 1.6e9) / 1e12  # at the clock of its power limit
        assert 0.88 <= predicted / rate <= 1.12, f"{tile}: {predicted:.0f} TFLOP/s, not {rate}"
    text = gemm_plan(m, n, k, layout, **options).text
    chosen = next(i for i, tile in enumerate(gemm_tiles(sm90=True)) if text.startswith(tile))
    assert rates[chosen] >= 0.97 * max(rates.values()), text
