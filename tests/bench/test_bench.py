"""Test bench/run.py: its measurements, and the comparison with another commit."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import run
from bench_program import BENCH, quiet, record, run_quick  # noqa: F401  (a fixture)
from harness import base, ledger, measure, providers, registry, table, timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROVIDERS = {**dict.fromkeys(registry.OPS, 2), "check_finite": 3, "gemm": 3, "train": 3}
FEWER = {
    **dict.fromkeys(("unscale", "check_finite", "grad_norm"), "16 x"),
    "step": "4000 x 4, clipped",
    "gemm": "fp16 64",
    "linear": "fp16",
    "scaler": "40 parameters",
    "autocast": "mm",
    "cast": "16",
    "train": "MLP",
}


# ---- the command -------------------------------------------------------------------------------


def test_cases_have_names_of_their_own() -> None:
    """Cases of a GPU are listed without one, and a case has one name."""
    for name in registry.OPS:
        for setup in (registry.Setup(CUDA), registry.Setup(CPU), registry.Setup(CPU, quick=True)):
            names = [case.name for case in registry.load(name).cases(setup)]
            assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", PROVIDERS)
def test_every_op_has_a_table_and_lines(tmp_path: Path, capsys, op: str) -> None:
    chosen = ["--filter", FEWER[op]] if op in FEWER else []
    status, records = run_quick(tmp_path / "out.jsonl", op, *chosen)
    printed = capsys.readouterr().out
    assert status == 0, printed
    limit, *measured = records
    assert limit["limit"]
    assert not any(each["limit"] for each in measured)
    assert len(measured) == PROVIDERS[op] * len({each["case"] for each in measured})
    for each in records:
        assert each.keys() == ledger.Record.__annotations__.keys()
        assert 0 < each["p20_us"] <= each["p50_us"] <= each["p80_us"]
        assert f"python bench/run.py {op} " in each["command"]
        assert (each["op"], each["driver"], each["error"]) == (op, None, None)
    for each in measured:
        assert (each["ratio"] is None) == (each["provider"] == "torch")
    lines = printed.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("case"))
    assert lines[heading].split()[2:4] == ["median", "us"]
    first = next(line for line in lines[heading + 1 :] if not line.startswith("-"))
    assert first.startswith("limit: ")
    assert lines[-1].startswith("geometric mean of ")


def test_lists_of_given_sizes_by_given_providers(tmp_path: Path, capsys) -> None:
    """Lists of given sizes are timed by the given providers; a CSV file has the same lines."""
    with pytest.raises(SystemExit):
        run.main(["unscale", "--sizes", "4x", "--device", "cpu"])
    assert "expected COUNTxSIZE such as 16x4Mi, got '4x'" in capsys.readouterr().err
    file, table_file = tmp_path / "out.jsonl", tmp_path / "out.csv"
    chosen = ("--sizes", "40x100,1x64Ki", "--providers", "cpu", "--csv", str(table_file))
    status, (_, *records) = run_quick(file, "unscale", *chosen)
    assert status == 0
    assert [each["provider"] for each in records] == 2 * ["cpu"]
    assert [each["case"].split(" fp32")[0] for each in records] == ["40 x 100", "1 x 64 Ki"]
    assert not any(each["ratio"] for each in records), "the baseline did not take part"
    with table_file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["case"] for row in rows[1:]] == [each["case"] for each in records]


# ---- one case ----------------------------------------------------------------------------------


def fails() -> None:
    raise RuntimeError("no such kernel")


def measured(verify: Callable = lambda provider: None, **launches: Callable) -> list[dict]:
    """Return the lines of a case with these providers."""
    made = tuple(registry.Provider(name, launch) for name, launch in launches.items())
    trial = registry.Trial(made, verify, registry.Work(bytes=8))
    op = registry.Op("unscale", "", "GB/s", False, limit=None, cases=None)
    case = registry.Case("a", lambda: trial)
    return measure.measure(case, op, registry.Setup(CPU), timing.Budget(0.0, 3, 1.0), {})


def found(records: list[dict]) -> dict[str, tuple[bool, bool, str | None]]:
    """Return by provider whether it has a time and a ratio, and its error."""
    return {r["provider"]: (bool(r["p20_us"]), bool(r["ratio"]), r["error"]) for r in records}


def test_a_provider_that_fails_or_is_wrong_leaves_the_others_their_ratios() -> None:
    calls = iter(range(4))
    records = measured(
        lambda provider: registry.check(provider.name != "library", "wrong"),
        **{"torch": lambda: 0, "cpu": lambda: 0, "triton": fails, "library": lambda: 0},
        cuda=lambda: next(calls),
    )
    assert found(records) == {
        "torch": (True, False, None),
        "cpu": (True, True, None),
        "library": (True, False, "CheckError: wrong"),
        "triton": (False, False, "RuntimeError: no such kernel"),
        "cuda": (False, False, "StopIteration: "),
    }
    _, rows = table.table(records, "GB/s")
    ratios = {row[1]: row[-1] for row in rows[:5]}
    assert [name for name, text in ratios.items() if text == "NO RATIO"] == [
        *("library", "triton", "cuda")
    ]


# ---- timing ------------------------------------------------------------------------------------


def test_providers_take_turns_and_excluded_time_is_subtracted(monkeypatch) -> None:
    calls: list[str] = []
    clock = iter(range(0, 10**9, 5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))

    @contextlib.contextmanager
    def around():
        calls.append("enter b")
        yield
        calls.append("leave b")

    made = [
        registry.Provider("a", lambda: calls.append("a"), lambda: calls.append("prepare a")),
        registry.Provider("b", lambda: calls.append("b"), excluded_ns=lambda: 2000, around=around),
    ]
    times = timing.interleaved(made, timing.Budget(seconds=0.0, samples=4, sample_us=1.0), {})
    assert (times["a"].p50, times["b"].p50) == (5.0, 3.0)
    a, b = ["prepare a", "a"], ["enter b", "b", "leave b"]
    assert calls[-20:] == 2 * (a + b + b + a)


# ---- providers ---------------------------------------------------------------------------------


def test_each_backend_of_a_gpu_has_a_line_of_its_own(monkeypatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(providers._C, "cuda_built", lambda: True)
    monkeypatch.setattr(providers.amp_ext, "set_backend", chosen.append)
    monkeypatch.setattr(providers._C, "set_gemm_mode", chosen.append)
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: "3.9")
    assert list(providers.ours(CPU)) == ["cpu"]
    lines = providers.ours(CUDA, products=True)
    expected = {
        "cuda": ["cuda", "kernel"],
        "triton": ["triton", "kernel"],
        "library": [None, "library"],
    }
    assert lines.keys() == expected.keys() < {*ledger.OURS}
    before = [providers.amp_ext.get_backend(), providers._C.gemm_mode()]
    for name, line in lines.items():
        chosen.clear()
        with contextlib.suppress(ZeroDivisionError), line():
            raise ZeroDivisionError
        assert chosen == expected[name] + before


# ---- another commit ----------------------------------------------------------------------------


def test_ratios_to_the_base_are_medians_of_rounds() -> None:
    def timed(*times: float, **more: object) -> list[ledger.Record]:
        return [record(p20_us=p20, **more) for p20 in times]

    good, bad = timed(5.0, case="b"), timed(5.0, case="b", error="CheckError: wrong")
    others = timed(1.0, provider="copy", limit=True, error="wrong")
    others += timed(1.0, provider="torch")
    _, rows, reasons = base.compared(
        [*timed(8.0, 2.0, 5.0), *good, *bad, *good, *others],
        [*timed(2.0, 2.0, 2.0), *3 * good, *timed(2.0, case="c"), *others],
    )
    assert rows[0] == ["7 x 7", "cpu", "unscale", "5.00", "2.00", "2.50", "1.00..4.00"]
    assert rows[1][:2] == ["geometric mean of 1 ratios base / now", "cpu"]
    assert reasons == [
        "NO RATIO for unscale, b, cpu: the base: CheckError: wrong",
        "NO RATIO for unscale, c, cpu: the base cannot run it",
    ]
