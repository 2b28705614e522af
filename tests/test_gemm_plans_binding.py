"""amp_ext._C.gemm_plan and bench/gpu/plan_gemm.py: what the planner would do, without a GPU."""

from __future__ import annotations

import re

import pytest

from amp_ext import _C


def test_every_tile_has_a_budget() -> None:
    tiles = _C.gemm_tiles()
    assert list(tiles) == ["gemm_kernel", "gemm_sm90_kernel"]
    for text in tiles["gemm_kernel"]:
        assert re.search(r"warps, \d stages, .*: \d+ registers, \d+ bytes of shared memory", text)
    for text in tiles["gemm_sm90_kernel"]:
        budget = r"(\d+) and (\d+) registers, (\d+) in all; 16 bits: (\d) stages, \d boxes, (\d+) "
        found = re.search(budget + r"bytes of shared memory; 32 bits: (\d) stages", text)
        assert found, text
        producer, consumer, pool, stages, shared, wide_stages = map(int, found.groups())
        assert (producer + 2 * consumer) * 128 == pool <= 65536
        assert shared <= 232448 and min(stages, wide_stages) >= 3


def test_a_plan() -> None:
    found = _C.gemm_plan(4096, 4096, 4096, "NT")
    assert found["sm90"] and found["plan"].startswith(found["tile"])
    assert found["cluster"] in {(2, 1), (1, 2)} and found["splits"] == 1
    # Each operand at least once, and the result.
    assert found["memory_bytes"] >= 3 * 4096**2 * 2 and found["l2_bytes"] > found["memory_bytes"]
    assert found["waves"] > 1 and 4096**3 / 132 / 2048 < found["cycles"] < 4096**3 / 132 / 1024
    other = _C.gemm_plan(4096, 4096, 4096, "NT", sm90=False)
    assert not other["sm90"] and other["cycles"] > found["cycles"]
    adding = _C.gemm_plan(4096, 4096, 4096, fp32_out=True, accumulate=True)
    assert "adding in memory" in adding["plan"]
    assert not _C.gemm_plan(0, 64, 64)["sm90"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2, 3, "NX"), "layout must be NN, NT, TN or TT, got NX"),
        ((1, -2, 3), "m, n, k and batch must be at least 0, got 1, -2, 3 and 1"),
        ((2**32, 2**32, 1), "the kernels do not serve 4294967296x4294967296x1"),
    ],
)
def test_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"amp_ext._C.gemm_plan: {message}")):
        _C.gemm_plan(*arguments)


def test_a_forced_plan() -> None:
    planned = _C.gemm_plan(4096, 4096, 4096, "NT")
    try:
        _C.force_gemm_plan(6, (1, 2), splits=2)
        found = _C.gemm_plan(4096, 4096, 4096, "NT")
        assert found["tile"].startswith("sm90 tile 64x256x64") and found["cluster"] == (1, 2)
        assert found["splits"] == 2
        # Neither other GPUs nor tiles that do not serve a product, nor more splits than steps.
        assert not _C.gemm_plan(4096, 4096, 4096, "NT", sm90=False)["sm90"]
        assert _C.gemm_plan(64, 64, 64)["splits"] == 1
        _C.force_gemm_plan(2)
        assert "128x224" in _C.gemm_plan(512, 512, 512, "NT")["tile"]
        assert "128x224" not in _C.gemm_plan(512, 512, 512, "NN")["tile"]
    finally:
        _C.force_gemm_plan(None)
    assert _C.gemm_plan(4096, 4096, 4096, "NT") == planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tile": 99}, "tile must be None or a number below 8, got 99"),
        ({"tile": 0, "cluster": (2, 2)}, "cluster must be (1, 1), (2, 1) or (1, 2), got (2, 2)"),
        ({"tile": 0, "splits": 0}, "splits must be at least 1 and group at least 0, got 0 and 0"),
    ],
)
def test_errors_of_forced_plans(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"amp_ext._C.force_gemm_plan: {message}")):
        _C.force_gemm_plan(**arguments)


def test_plans_of_the_benchmark(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from gpu import plan_gemm
    from workloads.gemm_shapes import large_shapes, small_shapes

    shapes = (*large_shapes(), *small_shapes())
    assert plan_gemm.main([]) == 0
    text = capsys.readouterr().out
    print(text)
    heads = re.findall(r"^(\S.*?) ([NT]{2}) +(\d+)x(\d+)x(\d+)$", text, re.MULTILINE)
    assert ("8B head dgrad", "NN", "4096", "4096", "128256") in heads
    assert len(heads) == sum(not shape.accumulate for shape in shapes)
    waves = [float(x) for x in re.findall(r"cycles, ([\d.]+) waves, [\d.]+ MB from L2", text)]
    assert len(waves) == len(heads) == text.count("MB from and to memory")
    busy = [int(x) for x in re.findall(r"busy for (\d+)%", text)]
    assert len(busy) == len(heads) and 80 < max(busy) < 100
    capsys.readouterr()

    assert plan_gemm.main(["--sm80", "--multiprocessors", "108"]) == 0
    assert "sm90" not in capsys.readouterr().out
