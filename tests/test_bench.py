"""The benchmark program: what it prints and writes, and that it refuses a wrong result's ratio."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_ext import testing

BENCH = Path(__file__).resolve().parents[1] / "bench"
KEYS = {
    "op",
    "case",
    "device",
    "provider",
    "p20_us",
    "p50_us",
    "p80_us",
    "bytes",
    "gb_per_s",
    "ratio",
    "device_name",
    "threads",
    "torch",
    "commit",
    "utc",
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """The modules of bench/; how busy the machine is shall not matter here."""
    monkeypatch.syspath_prepend(BENCH)
    import bench_scaler
    import bench_unscale
    import registry
    import run
    import timing

    monkeypatch.setattr(timing, "foreign_load", lambda wait: 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    modules = (bench_scaler, bench_unscale, registry, run, timing)
    yield {module.__name__: module for module in modules}
    torch.set_num_threads(threads)


def run_quick(bench, path: Path, op: str, text: str = "") -> tuple[int, list[dict]]:
    options = [op, "--device", "cpu", "--quick", "--filter", text, "--json", str(path)]
    status = bench["run"].main(options)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("op", ["unscale", "scaler"])
def test_quick_run(bench, tmp_path, capsys, op):
    status, records = run_quick(bench, tmp_path / "out.jsonl", op)
    table = capsys.readouterr().out
    assert status == 0, table
    assert all(len(line) <= 100 for line in table.splitlines())

    assert all(record.keys() >= KEYS for record in records)
    limit, *measured = records
    assert limit["case"].startswith("limit")
    cases = {record["case"] for record in measured}
    assert len(measured) == 2 * len(cases)
    for record in measured:
        assert record["op"] == op
        assert 0 < record["p20_us"] <= record["p50_us"] <= record["p80_us"]
        assert (record["ratio"] is None) == (record["provider"] == "torch")

    rows = [line for line in table.splitlines() if line[50:].strip()]
    heading = next(i for i, row in enumerate(rows) if row.startswith("case"))
    assert rows[heading + 1].startswith("limit")
    assert table.splitlines()[-1].startswith("geometric mean of ")


def test_mean_is_geometric_and_leaves_tiny_cases_out(bench):
    run, case, times = bench["run"], bench["registry"].Case, bench["timing"].Quantiles

    def outcome(ours: float, counted: bool = True):
        measured = {"amp_ext": times(ours, ours, ours), "torch": times(8.0, 8.0, 8.0)}
        return run.Outcome(case("", lambda: None, counted), times=measured)

    line = run.mean_line([outcome(1.0), outcome(4.0), outcome(0.01, counted=False)])
    assert line.split() == ["geometric", "mean", "of", "2", "ratios", "4.00"]
    refused = run.Outcome(case("", lambda: None), error="wrong")
    assert "1 of 2 ratios" in run.mean_line([outcome(1.0), refused])


def test_quantiles_are_of_the_samples(bench):
    quantiles = bench["timing"].Quantiles.of([float(i) for i in range(101)])
    assert (quantiles.p20, quantiles.p50, quantiles.p80) == (20.0, 50.0, 80.0)


def test_providers_take_turns_and_excluded_time_is_subtracted(bench, monkeypatch):
    timing, registry = bench["timing"], bench["registry"]
    calls: list[str] = []
    clock = iter(range(0, 10**9, 5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))
    providers = [
        registry.Provider("a", lambda: calls.append("a"), lambda: calls.append("prepare a")),
        registry.Provider("b", lambda: calls.append("b"), excluded_ns=lambda: 2000),
    ]
    budget = timing.Budget(seconds=0.0, samples=4, sample_us=1.0)
    times = timing.interleaved(providers, budget)
    assert times["a"].p50 == 5.0
    assert times["b"].p50 == 3.0
    forward, backward = ["prepare a", "a", "b"], ["b", "prepare a", "a"]
    assert calls[-12:] == 2 * (forward + backward)


def corrupt_values(grads, found_inf, inv_scale):
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    grads[-1].view(-1)[-1] *= 1.0000002


def forget_found_inf(grads, found_inf, inv_scale):
    torch._foreach_mul_(grads, inv_scale)


def raise_found_inf(grads, found_inf, inv_scale):
    torch._foreach_mul_(grads, inv_scale)
    found_inf.fill_(1.0)


@pytest.mark.parametrize("corrupt", [corrupt_values, forget_found_inf, raise_found_inf])
def test_wrong_unscale_gets_no_ratio(bench, tmp_path, capsys, monkeypatch, corrupt):
    monkeypatch.setattr(bench["bench_unscale"].ops, "unscale_", corrupt)
    status, records = run_quick(bench, tmp_path / "out.jsonl", "unscale", "2 x 10")
    table = capsys.readouterr().out
    assert status == 1
    assert "NO RATIO, CheckError" in table
    assert table.splitlines()[-1].split()[-1] == "none"
    assert all(record["ratio"] is None for record in records)
    assert all(record["error"] for record in records[1:])


class KeepsScale(torch.amp.GradScaler):
    def update(self, new_scale=None):
        super().update(self.get_scale())


class ForgetsToUnscale(torch.amp.GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        torch._foreach_mul_([leaf.grad for leaf in optimizer.param_groups[0]["params"]], 1.5)


@pytest.mark.parametrize("scaler", [KeepsScale, ForgetsToUnscale])
def test_wrong_scaler_gets_no_ratio(bench, tmp_path, capsys, monkeypatch, scaler):
    monkeypatch.setattr(bench["bench_scaler"].amp_ext, "GradScaler", scaler)
    status, records = run_quick(bench, tmp_path / "out.jsonl", "scaler", "40 parameters, SGD")
    assert status == 1
    assert "NO RATIO, CheckError" in capsys.readouterr().out
    assert all(record["ratio"] is None for record in records)


def test_a_failing_case_leaves_the_others_their_results(bench, tmp_path, capsys, monkeypatch):
    ours = bench["bench_unscale"].ours

    def fails_on_sixteen(grads, found_inf, inv_scale):
        if len(grads) == 16:
            raise RuntimeError("not sixteen tensors")
        ours(grads, found_inf, inv_scale)

    monkeypatch.setattr(bench["bench_unscale"], "ours", fails_on_sixteen)
    status, records = run_quick(bench, tmp_path / "out.jsonl", "unscale", "i fp32")
    table = capsys.readouterr().out
    assert status == 1
    assert "16 x 64 Ki fp32 NO RATIO, RuntimeError: not sixteen tensors" in table
    assert [record["case"] for record in records if record["ratio"]] == ["1 x 1 Mi fp32"]
    assert "geometric mean of 1 of 2 ratios" in table


def test_command_line():
    command = [sys.executable, str(BENCH / "run.py"), "unscale", "--device", "cpu"]
    run = subprocess.run([*command, "--filter", "absent"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "no case of unscale has 'absent' in its name" in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench["run"].main(["unscale", "--device", "cuda"])
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "misaligned"])
def test_generated_gradients(dtype, layout):
    shape = (2, 3, 4, 5)
    first, second = testing.gradients([shape, shape], dtype, layout=layout, seed=7)
    assert first.dtype == dtype
    assert first.shape == shape
    assert first.equal(testing.gradients([shape], dtype, layout=layout, seed=7)[0])
    assert not first.equal(second)
    assert first.abs().min() >= torch.finfo(dtype).tiny
    assert 0 < first.abs().max() < 1
    dense = first.is_contiguous(memory_format=torch.channels_last)
    assert first.is_contiguous() == (layout in ("contiguous", "misaligned"))
    assert dense == (layout == "channels_last")
    assert (first.storage_offset() == 1) == (layout == "misaligned")


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="got 'dense'"):
        testing.gradient(3, layout="dense")


def test_gpt2_small_has_its_124_million_parameters():
    shapes = testing.gpt2_small_shapes()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes) == 124_439_808
