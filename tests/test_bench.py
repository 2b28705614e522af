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
    import bench_autocast
    import bench_cast
    import bench_gemm
    import bench_scaler
    import bench_unscale
    import registry
    import run
    import timing

    monkeypatch.setattr(timing, "foreign_load", lambda wait: 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ops = (bench_autocast, bench_cast, bench_gemm, bench_scaler, bench_unscale)
    modules = (*ops, registry, run, timing)
    yield {module.__name__: module for module in modules}
    torch.set_num_threads(threads)


def run_quick(bench, path: Path, op: str, text: str = "") -> tuple[int, list[dict]]:
    options = [op, "--device", "cpu", "--quick", "--filter", text, "--json", str(path)]
    status = bench["run"].main(options)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


PROVIDERS = {"unscale": 2, "cast": 2, "scaler": 2, "gemm": 3, "autocast": 2}


@pytest.mark.parametrize("op", PROVIDERS)
def test_quick_run(bench, tmp_path, capsys, op):
    status, records = run_quick(bench, tmp_path / "out.jsonl", op)
    table = capsys.readouterr().out
    assert status == 0, table
    assert all(len(line) <= 100 for line in table.splitlines())

    assert all(record.keys() >= KEYS for record in records)
    limit, *measured = records
    assert limit["case"].startswith("limit")
    cases = {record["case"] for record in measured}
    assert len(measured) == PROVIDERS[op] * len(cases)
    for record in measured:
        assert record["op"] == op
        assert 0 < record["p20_us"] <= record["p50_us"] <= record["p80_us"]
        assert (record["ratio"] is None) == (record["provider"] == "torch")

    rows = [line for line in table.splitlines() if line[50:].strip()]
    heading = next(i for i, row in enumerate(rows) if row.startswith("case"))
    assert rows[heading + 1].startswith("limit")
    assert all(row[39] == " " for row in rows[heading:]), "a name runs into the next column"
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


def round_twice(a, b, *, trans_a, trans_b, out_dtype):
    product = (a.mT if trans_a else a).float() @ (b.mT if trans_b else b).float()
    return product.to(torch.bfloat16).to(a.dtype)


def lose_an_element(a, b, *, trans_a, trans_b, out_dtype):
    product = (a.mT if trans_a else a).float() @ (b.mT if trans_b else b).float()
    product[-1, -1] = torch.nan
    return product.to(a.dtype)


@pytest.mark.parametrize("corrupt", [round_twice, lose_an_element])
def test_wrong_gemm_gets_no_ratio(bench, tmp_path, capsys, monkeypatch, corrupt):
    monkeypatch.setattr(bench["bench_gemm"].ops, "gemm", corrupt)
    status, records = run_quick(bench, tmp_path / "out.jsonl", "gemm", "fp16 64^3")
    assert status == 1
    assert "NO RATIO, CheckError: an element is" in capsys.readouterr().out
    assert all(record["ratio"] is None for record in records)


class OtherDtype(torch.autocast):
    def __init__(self, device_type, dtype):
        super().__init__(device_type, torch.bfloat16)


def test_autocast_of_another_dtype_gets_no_ratio(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bench["bench_autocast"].REGIONS, "amp_ext", OtherDtype)
    status, _ = run_quick(bench, tmp_path / "out.jsonl", "autocast", "mm, FP16, forward")
    assert status == 1
    assert "NO RATIO, CheckError: the result is torch.bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "message"), [(0, "the result is"), (2, "the gradient of tensor")]
)
def test_autocast_of_other_values_gets_no_ratio(bench, place, message):
    module, device = bench["bench_autocast"], torch.device("cpu")
    loops = [
        module.Loop(torch.autocast, module.CALLS_MEASURED[0], module.BACKWARD, 2, device)
        for _ in range(2)
    ]
    module.verify(*loops)
    if message == "the result is":
        loops[0].tensors[place].detach().add_(1)
    else:
        loops[0].tensors[place].register_hook(lambda grad: grad + 1)
    with pytest.raises(bench["registry"].CheckError, match=message):
        module.verify(*loops)


def test_ratio_to_another_baseline(bench):
    """Where torch's product takes too long, the ratio is to FP32, and not in the mean."""
    gemm, run, times = bench["bench_gemm"], bench["run"], bench["timing"].Quantiles
    cases = gemm.cases(torch.device("cpu"), quick=False)
    (case,) = (case for case in cases if case.baseline != "torch")
    assert case.name == "fp16 2048^3 NN (to fp32)"
    assert not case.counted
    measured = {"amp_ext": times(2.0, 2.0, 2.0), "fp32": times(3.0, 3.0, 3.0)}
    outcome = run.Outcome(case, times=measured)
    assert (outcome.ratio("amp_ext"), outcome.ratio("fp32")) == (1.5, None)
    on_gpu = gemm.cases(torch.device("cuda"), quick=False)
    assert all((c.baseline, c.counted) == ("cublaslt", True) for c in on_gpu)


def test_rates(bench):
    times, trial = bench["timing"].Quantiles(2.0, 3.0, 4.0), bench["registry"].Trial
    case = bench["registry"].Case("", lambda: None)
    built = trial((), bytes=6000, parameters=4, flops=8000, calls=10)
    outcome = bench["run"].Outcome(case, built, {"amp_ext": times})
    units = {"GB/s": 3.0, "GFLOP/s": 4.0, "us/param": 0.5, "us/call": 0.2, "ms/step": 0.002}
    assert {unit: outcome.rate("amp_ext", unit) for unit in units} == units


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
