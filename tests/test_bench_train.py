"""The benchmark of training steps: its table, and that a wrong training gets no ratio."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The modules of bench/, with a checkerboard that takes milliseconds on one busy core."""
    monkeypatch.syspath_prepend(BENCH)
    import bench_train
    import registry
    import run
    import timing

    monkeypatch.setattr(timing, "foreign_load", lambda wait: 0.0)
    monkeypatch.setattr(bench_train, "pixels", lambda device, quick: 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield types.SimpleNamespace(train=bench_train, run=run, timing=timing, registry=registry)
    torch.set_num_threads(threads)


def run_bench(bench, path: Path) -> tuple[int, list[dict]]:
    options = ["train", "--device", "cpu", "--quick", "--json", str(path)]
    status = bench.run.main(options)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_benchmark(bench, tmp_path, capsys):
    status, (limit, *records) = run_bench(bench, tmp_path / "out.jsonl")
    table = capsys.readouterr().out
    assert status == 0, table
    assert all(len(line) <= 100 for line in table.splitlines())
    assert limit["case"] == "limit: products of 8 x 8, float32"
    cases = ("checkerboard 8 x 8", "regression MLP, batch 64", "digits MLP, batch 64")
    assert [(r["case"], r["provider"]) for r in records] == [
        (case, provider) for case in cases for provider in ("amp_ext", "torch", "fp32")
    ]
    for ours, theirs, fp32 in zip(*3 * [iter(records)], strict=True):
        assert ours["ratio"] == theirs["p20_us"] / ours["p20_us"]
        assert fp32["ratio"] == theirs["p20_us"] / fp32["p20_us"]
        assert theirs["ratio"] is None
    mean = torch.tensor([r["ratio"] for r in records[::3]]).log().mean().exp().item()
    assert table.splitlines()[-1] == f"{'geometric mean of 3 ratios':<40}{mean:>60.2f}"


def test_wrong_training_gets_no_ratio(bench, tmp_path, capsys, monkeypatch):
    """A loss that is 3% too high is more than the 2% that the check allows."""
    mse_loss = nn.functional.mse_loss

    def wrong(prediction, target):
        return mse_loss(prediction, target) * (1.03 if torch.is_autocast_enabled("cpu") else 1)

    monkeypatch.setattr(nn.functional, "mse_loss", wrong)
    status, (_, *records) = run_bench(bench, tmp_path / "out.jsonl")
    table = capsys.readouterr().out
    assert status == 1
    assert table.count("NO RATIO, CheckError: at step 1 the loss is") == 2
    assert [r["case"] for r in records if r["ratio"]] == 2 * ["digits MLP, batch 64"]


def test_skipped_steps_get_no_ratio(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bench.train.SCALER, "init_scale", 2.0**40)
    status, _ = run_bench(bench, tmp_path / "out.jsonl")
    assert status == 1
    assert "CheckError: amp_ext skipped steps: its scale is" in capsys.readouterr().out


def test_a_slow_provider_sits_rounds_out(bench, monkeypatch):
    now = 0

    def takes(us: float):
        def launch() -> None:
            nonlocal now
            now += int(us * 1e3)
            calls.append(us)

        return launch

    calls: list[float] = []
    monkeypatch.setattr(bench.timing.time, "perf_counter_ns", lambda: now)
    providers = [bench.registry.Provider(str(us), takes(us)) for us in (100.0, 400e3, 600e3)]
    budget = bench.timing.Budget(seconds=0.0, samples=25, sample_us=1.0)
    times = bench.timing.interleaved(providers, budget)
    assert [times[str(us)].p50 for us in (100.0, 400e3, 600e3)] == [100.0, 400e3, 600e3]
    warm_up = 4
    assert [calls.count(us) - warm_up for us in (100.0, 400e3, 600e3)] == [25, 25, 5]
