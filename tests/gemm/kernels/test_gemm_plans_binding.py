"""Make plans without a GPU (tests/support/planner.py), and force tiles."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from amp_ext import _C
from planner import Forced, gemm_plan, gemm_tiles


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


# Widths of the stream, of qkv, of the MLP's up (with its gate) and down layers.
MODELS = {
    "GPT-2": (768, 2304, 3072, 3072),
    "7B": (4096, 12288, 22016, 11008),
    "13B": (5120, 15360, 27648, 13824),
    "70B": (8192, 10240, 57344, 28672),
}
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def products(model: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield m, n, k and layout of a model's layers: forward, and both gradients."""
    width, qkv, up, down = MODELS[model]
    for tokens in TOKENS:
        for outputs, inputs in ((qkv, width), (width, width), (up, width), (width, down)):
            yield tokens, outputs, inputs, "NT"
            yield tokens, inputs, outputs, "NN"
            yield outputs, inputs, tokens, "TN"


@pytest.mark.parametrize("model", MODELS)
def test_predicted_efficiency_of_language_models(model: str) -> None:
    """Predictions of plans, not measurements, reach 0.85 of the attainable time."""
    for m, n, k, layout in products(model):
        if k < 2048 or m * n < 0.5 * 132 * 128 * 256:  # less than half a wave of tiles
            continue
        gradient = layout == "TN"
        options = {"fp32_out": gradient, "accumulate": gradient}
        plan, cycles, least = gemm_plan(m, n, k, layout, **options)
        assert 0.85 <= least / cycles <= 1, f"{m}x{n}x{k} {layout}: {plan}"
