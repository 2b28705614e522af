"""Test that `make gpu` keeps its budget and results, and that a rehearsal runs whole."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch

import gpu
import small_case
from harness.registry import OPS

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"


def stage(name: str, code: str, limit: float = 60, **options: object) -> gpu.Stage:
    return gpu.Stage(name, [sys.executable, "-c", code], limit, **options)


def run_all(folder: Path, *chosen: gpu.Stage, budget: float = 600) -> list[str]:
    """Return the summary's lines."""
    report = gpu.Report(folder / "a.summary.txt", "some GPU")
    gpu.run_all(chosen, {}, time.monotonic() + budget, report)
    assert report.failed == ("FAILED" in report.text.rpartition("some GPU")[2])
    return report.path.read_text().splitlines()


def test_a_failed_stage_leaves_the_others_their_results(tmp_path: Path) -> None:
    """A failed stage leaves the others their results.

    Stages obey interrupts, though a run in the background ignores them.
    """
    said = ["FAILED test_a.py::test_b[1] - assert 0", *(f"word {i}" for i in range(100))]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lines = run_all(
            tmp_path,
            stage("exits", f"print({chr(10).join(said)!r}); raise SystemExit(3)"),
            stage("hangs", SLEEPS, limit=2.0),
            gpu.Stage("absent", [str(tmp_path / "no program")], 60),
            stage("works", "print('5 passed in 0.1s')"),
            stage("tool", "", missing="compute-sanitizer is not installed"),
            stage("racecheck", "exit(1)", advisory=True),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    shown = [line.rpartition(" (")[0] for line in lines[2:] if "(" in line and "|" not in line]
    assert shown[0] == "exits            FAILED, exit status 3"
    assert shown[1] == "hangs            FAILED, out of time after 2 s"
    assert shown[2].startswith("absent           FAILED, it could not be started: [Errno 2]")
    assert shown[3] == "works            ok, 5 passed in 0.1s"
    assert "tool             left out, compute-sanitizer is not installed" in lines
    assert shown[4] == "racecheck        findings, exit status 1"
    kept = [line.removeprefix("    | ") for line in lines if line.startswith("    | ")]
    assert kept[:13] == [said[0], *said[-12:]]
    logged = (tmp_path / "a.log").read_text().splitlines()
    assert [line for line in logged if line in said] == said


def test_a_rehearsal_has_the_stages_of_a_gpu_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("AMP_EXT_GEMM", "kernel")
    ledger = tmp_path / "a.jsonl"
    on_gpu, rehearsed = gpu.stages(ledger, dry=False), gpu.stages(ledger, dry=True)
    assert [each.name for each in on_gpu] == [each.name for each in rehearsed]
    for each in [*on_gpu, *rehearsed]:
        files = [word for word in each.command if word.endswith(".py")]
        assert all((each.cwd / file).exists() for file in files), each
    bench = [each for each in on_gpu if each.group == "bench"]
    assert {each.name.split()[1] for each in bench} == set(OPS)
    assert sum(each.limit for each in bench[:7]) <= gpu.BENCHMARKS_S
    assert on_gpu[0].limit + gpu.BENCHMARKS_S <= gpu.BUDGET
    environment = gpu.environment(dry=False)
    assert environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert "AMP_EXT_GEMM" not in environment, "the caller's choice of kernels is not taken"


def test_the_small_inputs_are_computed_on_a_cpu() -> None:
    small_case.small_case(torch.device("cpu"))
