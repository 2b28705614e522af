"""bench/run.py: every op's table and lines, and that a failure costs one provider alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import run
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from harness import ledger, measure, registry, table, timing
from ops import gemm

CPU = torch.device("cpu")
PROVIDERS = {**dict.fromkeys(registry.OPS, 2), "check_finite": 3, "gemm": 3, "train": 3}
FEWER = {
    "gemm": "fp16",
    "linear": "fp16",
    "scaler": "40 parameters",
    "autocast": "mm",
    "cast": "16",
    "train": "MLP",
}


@pytest.mark.parametrize("op", PROVIDERS)
def test_quick_run(tmp_path, capsys, op):
    chosen = ["--filter", FEWER[op]] if op in FEWER else []
    status, records = run_quick(tmp_path / "out.jsonl", op, *chosen)
    printed = capsys.readouterr().out.splitlines()
    assert status == 0, printed
    assert all(len(line) <= 100 for line in printed)
    limit, *measured = records
    assert limit["limit"]
    assert not any(record["limit"] for record in measured)
    assert len(measured) == PROVIDERS[op] * len({record["case"] for record in measured})
    for record in records:
        assert record.keys() == ledger.Record.__annotations__.keys()
        assert 0 < record["p20_us"] <= record["p50_us"] <= record["p80_us"]
        assert f"python bench/run.py {op} " in record["command"]
        assert (record["op"], record["driver"], record["error"]) == (op, None, None)
    for record in measured:
        assert (record["ratio"] is None) == (record["provider"] == "torch")
    rows = [line for line in printed if line[50:].strip()]
    heading = next(i for i, row in enumerate(rows) if row.startswith("case"))
    assert rows[heading + 1].startswith("limit")
    assert printed[-1].startswith("geometric mean of ")


def test_names_are_unique_and_fit():
    for name in registry.OPS:
        for setup in (registry.Setup(CPU), registry.Setup(CPU, quick=True)):
            names = [case.name for case in registry.load(name).cases(setup)]
            assert len(set(names)) == len(names)
            assert max(map(len, names)) <= table.NAME


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_dtypes(dtype):
    """Every op has the cases of a dtype, or none."""
    setup = registry.Setup(CPU, quick=True, dtype=registry.DTYPES[dtype])
    lacking = {name for name in registry.OPS if not registry.load(name).cases(setup)}
    fp32, halves = {"train", "gemm", "autocast"}, {"update_scale", "scaler", "step"}
    assert lacking == (fp32 if dtype == "fp32" else halves)


def test_networks_on_a_gpu_are_whole():
    """Without a GPU the cases can be listed; on a CPU their names say that they are scaled."""
    on_gpu = registry.Setup(torch.device("cuda"))
    for op, text in (("gemm", "70B"), ("linear", "MLP 8B"), ("train", "GPT-2 small, 8 x 1024")):
        names = [case.name for case in registry.load(op).cases(on_gpu)]
        assert any(text in name for name in names)
        assert not any(" at 1/" in name for name in names)
    assert all((c.baseline, c.counted) == ("cublaslt", True) for c in gemm.cases(on_gpu))


# ---- one case ----------------------------------------------------------------------------------


def fails() -> None:
    raise RuntimeError("no such kernel")


def measured(verify=lambda names: {}, counted: bool = True, **launches) -> list[dict]:
    """The lines of a case with these providers."""
    made = tuple(registry.Provider(name, launch) for name, launch in launches.items())
    trial = registry.Trial(made, verify, registry.Work(bytes=8))
    op = registry.Op("unscale", (), "GB/s", False, limit=None, cases=None)
    case = registry.Case("a", lambda: trial, counted)
    return measure.measure(case, op, registry.Setup(CPU), timing.Budget(0.0, 3, 1.0), {})


def found(records: list[dict]) -> dict[str, tuple[bool, bool, str | None]]:
    """By provider: whether it has a time and a ratio, and its error."""
    return {r["provider"]: (bool(r["p20_us"]), bool(r["ratio"]), r["error"]) for r in records}


def test_a_provider_that_fails_leaves_the_others_their_ratios():
    """At once or later."""
    calls = iter(range(4))
    records = measured(torch=lambda: 0, cpu=lambda: 0, triton=fails, cuda=lambda: next(calls))
    assert found(records) == {
        "torch": (True, False, None),
        "cpu": (True, True, None),
        "triton": (False, False, "RuntimeError: no such kernel"),
        "cuda": (False, False, "StopIteration: "),
    }


def test_a_wrong_result_gets_no_ratio_and_leaves_the_others_theirs():
    records = measured(
        lambda names: {"triton": "CheckError: wrong"},
        torch=lambda: 0,
        cuda=lambda: 0,
        triton=lambda: 0,
    )
    assert found(records) == {
        "torch": (True, False, None),
        "cuda": (True, True, None),
        "triton": (True, False, "CheckError: wrong"),
    }
    rows = list(table.rows(records, "GB/s"))
    assert rows[-1].split() == ["triton", "NO", "RATIO,", "CheckError:", "wrong"]
    assert [row.split()[-1] for row in table.mean_rows(records)][1:] == ["none"]


def test_without_its_baseline_a_case_has_times_alone():
    records = measured(torch=fails, cuda=lambda: 0)
    error = "RuntimeError: no such kernel"
    assert found(records) == {"cuda": (True, False, None), "torch": (False, False, error)}


def test_a_case_that_cannot_be_built_has_a_line():
    op = registry.load("unscale")
    records = measure.measure(
        registry.Case("a", fails), op, registry.Setup(CPU), timing.QUICK["cpu"], {}
    )
    assert found(records) == {"torch": (False, False, "RuntimeError: no such kernel")}


def test_mean_is_geometric_and_leaves_out_what_is_not_counted():
    base = {"limit": False, "counted": True, "provider": "cpu"}
    records = [
        {**base, "case": "a", "ratio": 8.0},
        {**base, "case": "b", "ratio": 2.0},
        {**base, "case": "c", "ratio": 0.01, "counted": False},
        {**base, "case": "d", "ratio": None},
    ]
    (line,) = table.mean_rows(records)
    assert line.split() == ["geometric", "mean", "of", "2", "of", "3", "ratios", "cpu", "4.00"]


# ---- the command -------------------------------------------------------------------------------


def test_results_have_a_file_of_their_own(tmp_path, capsys):
    options = ["--filter", "1 found_inf, scale moved", "--results", str(tmp_path)]
    assert run.main(["update_scale", "--device", "cpu", "--quick", *options]) == 0
    (file,) = tmp_path.glob("*/*.jsonl")
    assert file.parent.name.startswith("cpu-")
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {file}"
    assert len(ledger.read(tmp_path)) == 3


def test_command_line():
    """An op that has none of the cases asked for leaves the others."""
    command = [sys.executable, str(BENCH / "run.py"), "unscale", "cast", "--device", "cpu"]
    options = ["--quick", "--filter", "2 x 10 fp32 to"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    assert ran.returncode == 0
    assert "no case of unscale has '2 x 10 fp32 to' in its name" in ran.stderr
    assert "cast on cpu" in ran.stdout
