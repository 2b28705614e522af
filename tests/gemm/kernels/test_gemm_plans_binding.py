"""Plans without a GPU (bench/gpu/planner.py, plan_gemm.py), and tiles that are forced."""

from __future__ import annotations

import re

import pytest

from amp_ext import _C
from gpu.planner import Forced, gemm_plan, gemm_tiles


def test_a_plan() -> None:
    plan, cycles, least = gemm_plan(4096, 4096, 4096, "NT")
    assert re.match(
        r"sm90 tile \d+x\d+x64, cooperative, cluster [12]x[12], [345] stages; a k", plan
    )
    assert 4096**3 / 132 / 2048 < least < cycles < 4096**3 / 132 / 1024
    plan, slower, nothing = gemm_plan(4096, 4096, 4096, "TN", sm90=False)
    assert "sm90" not in plan and "a mn-major, b mn-major" in plan and slower > cycles
    assert nothing is None
    assert "32 steps" in gemm_plan(4096, 4096, 2048, fp32_out=True).text


def test_a_forced_tile() -> None:
    """A forced tile computes every product that it can, with at most as many splits as steps."""
    forced = Forced(6, (1, 2), splits=2)
    plan = gemm_plan(4096, 4096, 4096, "NT", forced=forced).text
    assert plan.startswith("sm90 tile 64x256x64, ping-pong, cluster 1x2") and "in 2 splits" in plan
    assert "sm90" not in gemm_plan(4096, 4096, 4096, "NT", sm90=False, forced=forced).text
    assert "splits" not in gemm_plan(64, 64, 64, forced=forced).text
    plan = gemm_plan(512, 512, 4096, "NT", forced=forced._replace(ranges=3)).text
    assert "; 8x1 tiles, 2 splits and 3 ranges of their last 10 steps, 64 steps" in plan
    assert "128x224" in gemm_plan(512, 512, 512, "NN", forced=Forced(2)).text


WRONG = (
    Forced(99),
    Forced(-1),
    Forced(0, (2, 2)),
    Forced(0, splits=0),
    Forced(0, splits=256),
    Forced(0, splits=-1, ranges=2),
    Forced(0, sm90=False, ranges=2),
    Forced(0, (2, 1), sm90=False),
)


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
        assert _C.force_gemm_tile(count[True] - 1, (1, 2), 0, ranges=3) is None
    _C.force_gemm_tile(None)
    every = [Forced(tile, sm90=sm90) for sm90 in count for tile in range(count[sm90])]
    cut = [Forced(0, (2, 1), 2), Forced(0, (1, 2), 2), Forced(0, splits=2, ranges=1)]
    assert len({forced.variant for forced in (*every, *cut)}) == len(every) + len(cut)


def test_a_size_that_nothing_computes() -> None:
    with pytest.raises(ValueError, match="the kernels cannot compute 4294967296x4294967296x1"):
        gemm_plan(2**32, 2**32, 1)


def test_plans_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    from gpu import plan_gemm

    assert plan_gemm.main([]) == 0
    text = capsys.readouterr().out
    assert "\n8B head dgrad NN: 4096x4096x128256\n    sm90 tile" in text
    assert text.count("predicted efficiency") == text.count("thousand cycles")
    assert plan_gemm.main(["--grid"]) == 0
    assert "13B down accumulate, 512 tokens TN: 5120x13824x512" in capsys.readouterr().out
    assert plan_gemm.main(["--sm80", "--multiprocessors", "108"]) == 0
    other = capsys.readouterr().out
    assert "sm90" not in other and other.count("thousand cycles") == text.count("thousand cycles")


def test_predicted_efficiency_of_language_models() -> None:
    """Predicted, not measured, efficiencies are at least 0.85 of the attainable speed."""
    from gpu.plan_gemm import asked, predict
    from workloads.gemm_shapes import grid_shapes

    predictions = [x for x in map(predict, grid_shapes()) if asked(x)]
    assert len(predictions) == 204
    for x in predictions:
        assert x.efficiency >= 0.85, f"{x.efficiency:.3f} of {x.shape.name}: {x.plan}"
        assert x.of_tensor_cores < x.efficiency <= 1, f"{x.efficiency:.3f} of {x.shape.name}"
    assert sum(x.of_tensor_cores >= 0.85 for x in predictions) >= 184
