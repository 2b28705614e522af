"""Test that `make gpu` keeps its budget and results, and that a rehearsal runs whole."""

import signal
import sys
import time
from pathlib import Path

import torch

import gpu
import small_case
from harness.registry import OPS


def stage(name: str, code: str, limit: float = 60, **options: object) -> gpu.Stage:
    return gpu.Stage(name, [sys.executable, "-c", code], limit, **options)


def test_a_failed_stage_leaves_the_others_their_results(tmp_path: Path) -> None:
    """Stages obey interrupts, though a run in the background ignores them."""
    said = ["FAILED test_a.py::test_b[1] - assert 0", *(f"word {i}" for i in range(100))]
    stages = [
        stage("exits", f"print({chr(10).join(said)!r}); raise SystemExit(3)"),
        stage("hangs", "import time; time.sleep(60)", limit=2.0),
        gpu.Stage("absent", [str(tmp_path / "no program")], 60),
        stage("works", "print('5 passed in 0.1s')"),
        stage("tool", "", missing="compute-sanitizer is not installed"),
        stage("racecheck", "exit(1)", advisory=True),
    ]
    report = gpu.Report(tmp_path / "a.summary.txt", "some GPU")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        gpu.run_all(stages, {}, time.monotonic() + 600, report)
    finally:
        signal.signal(signal.SIGINT, before)
    assert report.failed
    lines = report.path.read_text().splitlines()
    for start in (
        "exits            FAILED, exit status 3 (",
        "hangs            FAILED, out of time after 2 s (",
        "absent           FAILED, it could not be started: [Errno 2]",
        "works            ok, 5 passed in 0.1s (",
        "tool             left out, compute-sanitizer is not installed",
        "racecheck        findings, exit status 1 (",
    ):
        assert any(line.startswith(start) for line in lines), start
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
