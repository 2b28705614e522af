"""The benchmark program: what it prints and writes, and that a failure costs one case alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ops import gemm as bench_gemm
from ops import unscale_ as bench_unscale
from harness import ledger
from harness import measure
from harness import providers
from harness import registry
import run
from harness import table
from harness import timing
from amp_ext import testing
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
PROVIDERS = {
    **dict.fromkeys(("unscale", "norm", "update", "cast", "scaler", "linear", "autocast"), 2),
    **dict.fromkeys(("check", "gemm"), 3),
}
FEWER = {"gemm": "fp16", "linear": "fp16", "scaler": "40 parameters"}  # the others differ little


@pytest.mark.parametrize("op", PROVIDERS)
def test_quick_run(tmp_path, capsys, op):
    chosen = ["--filter", FEWER[op]] if op in FEWER else []
    status, records = run_quick(tmp_path / "out.jsonl", op, *chosen)
    printed = capsys.readouterr().out.splitlines()
    assert status == 0, printed
    assert all(len(line) <= 100 for line in printed)

    assert all(record.keys() == ledger.Record.__annotations__.keys() for record in records)
    limit, *measured = records
    assert limit["limit"]
    assert not any(record["limit"] for record in measured)
    cases = {record["case"] for record in measured}
    assert len(measured) == PROVIDERS[op] * len(cases)
    for record in measured:
        assert record["op"] == op
        assert 0 < record["p20_us"] <= record["p50_us"] <= record["p80_us"]
        assert (record["ratio"] is None) == (record["provider"] == "torch")
        assert record["command"].startswith(f"python bench/run.py {op} ")
        assert (record["driver"], record["error"]) == (None, None)

    rows = [line for line in printed if line[50:].strip()]
    heading = next(i for i, row in enumerate(rows) if row.startswith("case"))
    assert rows[heading + 1].startswith("limit")
    assert all(row[39] == " " for row in rows[heading:]), "a name runs into the next column"
    assert printed[-1].startswith("geometric mean of ")


def test_several_ops_and_those_without_a_case(tmp_path, capsys):
    """Of BF16 the scale has no case: the others run."""
    options = ("update", "cast", "update", "--dtype", "bf16", "--filter", "2 x 10")
    status, records = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0
    assert {record["op"] for record in records} == {"cast"}
    assert "no case of update has '2 x 10' in its name" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_dtypes(dtype):
    """Every op has the cases of a dtype, or none; names say which."""
    setup = registry.Setup(CPU, quick=True, dtype=registry.DTYPES[dtype])
    cases = {name: registry.load(name).cases(setup) for name in registry.OPS}
    lacking = {name for name, made in cases.items() if not made}
    fp32, halves = {"train", "gemm", "autocast"}, {"update", "scaler"}
    assert lacking == (fp32 if dtype == "fp32" else halves)
    for name in ("unscale", "check", "norm", "cast", "gemm", "linear", "autocast"):
        assert all(dtype in case.name for case in cases[name])


def test_names_are_unique_and_fit():
    for name in registry.OPS:
        for setup in (registry.Setup(CPU), registry.Setup(CPU, quick=True)):
            names = [case.name for case in registry.load(name).cases(setup)]
            assert len(set(names)) == len(names)
            assert max(map(len, names)) <= table.NAME


def test_networks_on_a_gpu_are_whole(monkeypatch):
    """Without a GPU the cases can be listed; on a CPU their names say that they are scaled."""
    on_gpu, on_cpu = (registry.Setup(torch.device(name)) for name in ("cuda", "cpu"))
    for op, text in (("gemm", "70B"), ("gemm", "8B up accumulate"), ("linear", "MLP 8B")):
        names = [case.name for case in registry.load(op).cases(on_gpu)]
        assert any(text in name for name in names)
        assert not any(" at 1/" in name for name in names)
        assert any(" at 1/" in case.name for case in registry.load(op).cases(on_cpu))
    cases = bench_gemm.cases(on_gpu)
    assert all((c.baseline, c.counted) == ("cublaslt", True) for c in cases)


def outcome(ours: float, counted: bool = True) -> measure.Outcome:
    times = {name: timing.Quantiles(us, us, us) for name, us in (("cpu", ours), ("torch", 8.0))}
    return measure.Outcome(registry.Case("", lambda: None, counted), times=times)


def test_mean_is_geometric_and_leaves_tiny_cases_out():
    (line,) = table.mean_rows([outcome(1.0), outcome(4.0), outcome(0.01, counted=False)])
    assert line.split() == ["geometric", "mean", "of", "2", "ratios", "cpu", "4.00"]
    refused = measure.Outcome(registry.Case("", lambda: None), errors={"torch": "wrong"})
    (line,) = table.mean_rows([outcome(1.0), refused])
    assert "1 of 2 ratios" in line


def test_each_backend_has_its_mean():
    both = outcome(2.0)
    both.times["triton"] = timing.Quantiles(4.0, 4.0, 4.0)
    lines = [line.split()[-2:] for line in table.mean_rows([both])]
    assert lines == [["cpu", "4.00"], ["triton", "2.00"]]


def test_a_long_name_has_a_line_of_its_own():
    made = outcome(2.0)
    made.case = registry.Case("n" * 60, lambda: None)
    lines = list(table.rows(made, "ms/step"))
    assert lines[0] == "n" * 60
    assert lines[1].split()[0] == "cpu"


def test_ratio_to_another_baseline():
    """Where torch's product takes too long, the ratio is to FP32, and not in the mean."""
    (case,) = (c for c in bench_gemm.cases(registry.Setup(CPU)) if c.baseline != "torch")
    assert case.label == "fp16 1024^3 NN (to fp32)"
    assert not case.counted
    times = {"cpu": timing.Quantiles(2.0, 2.0, 2.0), "fp32": timing.Quantiles(3.0, 3.0, 3.0)}
    made = measure.Outcome(case, times=times)
    assert (made.ratio("cpu"), made.ratio("fp32")) == (1.5, None)


def test_rates():
    work = registry.Work(bytes=6000, parameters=4, flops=8000, calls=10)
    units = {"GB/s": 3.0, "GFLOP/s": 4.0, "us/param": 0.5, "us/call": 0.2, "ms/step": 0.002}
    assert {unit: work.rate(unit, 2.0) for unit in units} == units
    with pytest.raises(ValueError, match="no rate is called GB"):
        work.rate("GB", 2.0)


def test_a_failing_case_leaves_the_others_their_results(tmp_path, capsys, monkeypatch):
    ours = bench_unscale.ours

    def fails_on_sixteen(grads, flag, factor):
        if len(grads.flat) == 16:
            raise RuntimeError("not sixteen tensors")
        ours(grads, flag, factor)

    monkeypatch.setattr(bench_unscale, "ours", fails_on_sixteen)
    status, records = run_quick(tmp_path / "out.jsonl", "unscale", "--filter", "i fp32")
    printed = capsys.readouterr().out
    assert status == 1
    assert "NO RATIO, RuntimeError: not sixteen tensors" in printed
    assert [record["case"] for record in records if record["ratio"]] == ["1 x 1 Mi fp32"]
    assert "geometric mean of 1 of 2 ratios" in printed


def trial_of(verify=lambda names: {}, **launches) -> registry.Trial:
    made = tuple(registry.Provider(name, launch) for name, launch in launches.items())
    return registry.Trial(made, verify, registry.Work(bytes=8))


def fails() -> None:
    raise RuntimeError("no such kernel")


def measured(build) -> list[dict]:
    op = registry.Op("unscale", (), "GB/s", False, limit=None, cases=None)
    budget = timing.Budget(0.0, 3, 1.0)
    outcome = measure.measure(registry.Case("a", build), op, registry.Setup(CPU), budget, False)
    return list(outcome.records(op, {}))


def test_a_provider_that_fails_leaves_the_others_their_ratios():
    records = measured(lambda: trial_of(torch=lambda: 0, cuda=lambda: 0, triton=fails))
    assert [record["provider"] for record in records] == ["torch", "cuda", "triton"]
    assert records[1]["ratio"] > 0
    last = records[2]
    assert (last["p20_us"], last["ratio"]) == (None, None)
    assert last["error"] == "RuntimeError: no such kernel"


def test_a_wrong_result_leaves_the_others_their_ratios():
    seen = []

    def verify(names):
        seen.extend(names)
        return {"triton": "CheckError: wrong"}

    records = measured(lambda: trial_of(verify, torch=lambda: 0, cuda=lambda: 0, triton=lambda: 0))
    assert seen == ["torch", "cuda", "triton"]
    ratios = {record["provider"]: bool(record["ratio"]) for record in records}
    assert ratios == {"torch": False, "cuda": True, "triton": False}
    assert records[2]["p20_us"] > 0


def test_a_provider_that_fails_later_leaves_the_others_their_ratios():
    calls = iter(range(3))
    records = measured(lambda: trial_of(torch=lambda: 0, cuda=lambda: next(calls), cpu=lambda: 0))
    found = {record["provider"]: (record["error"], bool(record["ratio"])) for record in records}
    assert found == {
        "torch": (None, False),
        "cpu": (None, True),
        "cuda": ("StopIteration: ", False),
    }


def test_without_its_baseline_a_case_has_times_alone():
    records = measured(lambda: trial_of(torch=fails, cuda=lambda: 0))
    found = {record["provider"]: (record["p20_us"] is None, record["ratio"]) for record in records}
    assert found == {"cuda": (False, None), "torch": (True, None)}


def test_a_case_that_cannot_be_built_has_a_line():
    (record,) = measured(fails)
    assert (record["provider"], record["p20_us"]) == ("torch", None)
    assert record["error"] == "RuntimeError: no such kernel"


def test_amp_ext_alone(tmp_path, capsys):
    options = ("unscale", "--filter", "2 x 10", "--ours", "--seconds", "0")
    status, records = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0
    assert [record["provider"] for record in records] == ["mul_", "cpu"]
    assert [record["ratio"] for record in records] == [None, None]


def test_results_have_a_file_of_their_own(tmp_path, capsys):
    options = ["update", "--device", "cpu", "--quick", "--results", str(tmp_path)]
    assert run.main([*options, "--filter", "1 found_inf, scale moved"]) == 0
    (file,) = tmp_path.rglob("*.jsonl")
    assert file.parent.name.startswith("cpu-")
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {file}"
    assert len(ledger.read(tmp_path)) == 3


def test_command_line():
    command = [sys.executable, str(BENCH / "run.py"), "unscale", "--device", "cpu"]
    ran = subprocess.run([*command, "--filter", "absent"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "no case of unscale has 'absent' in its name" in ran.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gemm", "unknown"], "invalid choice: 'unknown'"),
        (["gemm", "--results", "a", "--json", "b"], "--results stands alone"),
    ],
)
def test_refused_options(capsys, options, message):
    with pytest.raises(SystemExit):
        run.main([*options, "--device", "cpu"])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["unscale", "--device", "cuda"])
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


def test_torch_compile_is_for_those_who_ask_on_a_cpu():
    def compiled(*options: str) -> bool:
        return run.parse(["unscale", "--device", "cpu", *options]).compile

    assert (compiled(), compiled("--quick"), compiled("--compile")) == (False, False, True)


def test_all_is_every_op():
    assert run.parse(["all", "--device", "cpu"]).ops == list(registry.OPS)
    assert providers.ours(CPU).keys() <= ledger.OURS


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
