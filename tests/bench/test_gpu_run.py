"""`make gpu`: its stages, what a failing one leaves of the others, and the summary."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_program import record
from gpu import __main__ as gpu
from gpu import small_case, stages, targets
from harness.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"
GROUPS = ("tests", "checks", "bench")
SANITIZERS = ("memcheck", "synccheck", "racecheck")


@pytest.fixture
def stage() -> Callable:
    def make(name: str, code: str, limit: float = 60, **options: object):
        return stages.Stage(name, [sys.executable, "-c", code], limit, **options)

    return make


@pytest.fixture
def target(tmp_path, monkeypatch) -> SimpleNamespace:
    """A run on a GPU, which is made up, and its rehearsal."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    return SimpleNamespace(gpu=targets.Gpu.of(tmp_path), rehearsal=targets.Rehearsal.of(tmp_path))


def run_all(folder: Path, *chosen, budget: float = 600) -> list[str]:
    """The summary's lines."""
    summary = stages.Summary(folder / "summary.txt", "some GPU")
    end = time.monotonic() + budget
    stages.run_all(chosen, {}, end, summary, folder / "log")
    assert summary.failed == ("FAILED" in summary.text)
    return summary.path.read_text().splitlines()


# ---- stages ------------------------------------------------------------------------------------


def test_a_failed_stage_leaves_the_others_their_results(stage, tmp_path):
    """By exit status, time-out, crash, a program that is not there. Stages obey interrupts that a
    run in the background ignores: one out of time can still say what it has found."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lines = run_all(
            tmp_path,
            stage("exits", "print('why'); raise SystemExit(3)"),
            stage("hangs", SLEEPS, limit=2.0),
            stage("crashes", "import os; os.abort()"),
            stages.Stage("absent", [str(tmp_path / "no program")], 60),
            stage("works", "print('5 passed in 0.1s')"),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    shown = [line.rpartition(" (")[0] for line in lines if "(" in line and "|" not in line]
    assert shown[0] == "exits            FAILED, exit status 3"
    assert shown[1] == "hangs            FAILED, out of time after 2 s"
    assert shown[2] == "crashes          FAILED, killed by SIGABRT"
    assert shown[3].startswith("absent           FAILED, it could not be started: [Errno 2]")
    assert shown[4] == "works            ok, 5 passed in 0.1s"
    assert {"    | why", "    | begun", "    | KeyboardInterrupt"} <= set(lines)


def test_what_failed_is_in_the_summary_and_everything_in_the_log(stage, tmp_path):
    said = ["FAILED test_a.py::test_b[1] - assert 0", '  File "/work/tests/test_a.py", line 3']
    said += [f"word {number}" for number in range(100)]
    lines = run_all(
        tmp_path, stage("fails", f"print({chr(10).join(said)!r}); exit(1)"), stage("ok", "")
    )
    kept = [line.removeprefix("    | ") for line in lines if line.startswith("    | ")]
    assert kept == [*said[:2], *said[-12:]]
    logged = (tmp_path / "log").read_text().splitlines()
    assert [line for line in logged if line in said] == said
    assert [line for line in logged if line.startswith("== ok  ")]


def test_what_is_missing_or_advice_fails_nothing(stage, tmp_path):
    lines = run_all(
        tmp_path,
        stage("tool", "", missing="compute-sanitizer is not installed"),
        stage("racecheck", "exit(1)", advisory=True),
    )
    assert lines[2] == "tool             left out, compute-sanitizer is not installed"
    assert lines[3].startswith("racecheck        findings, exit status 1")


def test_a_budget_is_kept_and_time_reserved(stage, tmp_path):
    lines = run_all(
        tmp_path,
        stage("greedy", SLEEPS, reserve=15),
        stage("later", "print('here')"),
        stage("never", "", reserve=1000),
        budget=17.0,
    )
    assert lines[2].startswith("greedy           FAILED, out of time after ")
    assert any(line.startswith("later            ok") for line in lines)
    assert lines[-1] == "never            left out, no time"


def test_a_second_run_leaves_the_summary_of_the_first(stage, tmp_path):
    for name in ("first", "second"):
        lines = run_all(tmp_path, stage(name, ""))
    assert [line.split()[0] for line in lines if " ok " in line] == ["first", "second"]


# ---- targets -----------------------------------------------------------------------------------


def test_a_rehearsal_has_the_stages_of_a_gpu_run(target):
    on_gpu, rehearsed = (list(t.stages(GROUPS)) for t in (target.gpu, target.rehearsal))
    assert [stage.name for stage in on_gpu] == [stage.name for stage in rehearsed]
    for stage in [*on_gpu, *rehearsed]:
        files = [word for word in stage.command if word.endswith(".py")]
        assert all((stage.cwd / file).exists() for file in files), stage
    left_out = [stage.name for stage in rehearsed if stage.missing]
    assert left_out == ["tests sm_90", "triton lists", "triton products", *SANITIZERS]
    tested = [s for s in rehearsed if s.name.startswith("tests")]
    assert all(s.command[-2] == "--tests" for s in tested)
    assert all("--quick" in s.command for s in rehearsed if s.name.startswith("bench"))
    assert not any("--quick" in s.command for s in on_gpu)


def test_the_most_wanted_come_first_and_benchmarks_keep_their_time(target):
    on_gpu = list(target.gpu.stages(GROUPS))
    names = [stage.name for stage in on_gpu]
    assert names[:5] == ["build", "verify", "doctor", "tests lists", "tests products"]
    first = names.index("bench unscale")
    assert {name.split()[1] for name in names[first:]} == set(OPS)
    assert all(s.reserve >= targets.BENCHMARKS_S for s in on_gpu[:first])
    assert sum(s.limit for s in on_gpu[first:][:7]) <= targets.BENCHMARKS_S
    assert on_gpu[0].limit + on_gpu[0].reserve <= gpu.BUDGET


def test_one_group_alone(target) -> None:
    for group in GROUPS:
        build, *others = target.gpu.stages([group])
        assert build.name == "build"
        assert {stage.group for stage in others} == {group}
        assert (build.reserve > 0) == (group == "bench")


def test_every_test_file_has_one_place():
    patterns = (targets.TILES, targets.PRODUCTS, targets.NOT_OF_A_GPU, targets.OTHERS)
    found = [name for pattern in patterns for name in targets.files(pattern)]
    assert len(found) == len(set(found)) == len(list(targets.FOLDER.rglob("test_*.py")))
    assert all(map(targets.files, patterns))
    assert "bench/test_cublaslt.py" in targets.files(targets.PRODUCTS)


def test_the_callers_choice_of_kernels_is_not_taken(target, monkeypatch):
    choices = {"TRITON_INTERPRET", "AMP_EXT_BACKEND", "AMP_EXT_GEMM"}
    for name in choices:
        monkeypatch.setenv(name, "1")
    assert not choices & target.gpu.environment().keys()
    assert target.gpu.environment()["TORCH_CUDA_ARCH_LIST"] == "9.0a"


# ---- the command -------------------------------------------------------------------------------


def test_from_the_command_line_to_the_table(stage, tmp_path, monkeypatch, capsys):
    def stages(target, groups):
        target.ledger.write_text(json.dumps(record(ratio=2.5)))
        yield from (stage("build", "exit(1)"), stage("bench unscale", ""))
        yield stage("bench norm", "exit(2)")

    monkeypatch.setattr(targets.Rehearsal, "stages", stages)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.main(["--dry-run", str(tmp_path)]) == 1
    assert "is for tests/fake_cuda/run.py" in capsys.readouterr().err
    monkeypatch.setenv("FAKE_CUDA_KERNELS", "here")
    assert gpu.main(["--dry-run", str(tmp_path)]) == 1
    (file,) = tmp_path.glob("rehearsal/*.summary.txt")
    lines = file.read_text().splitlines()
    assert lines[0].startswith("REHEARSAL on tests/fake_cuda: no figure of it is a GPU's")
    assert lines[2].startswith("build            FAILED, exit status 1")
    assert lines[3].startswith("bench unscale    ok")
    assert lines[4].startswith("bench norm       FAILED, exit status 2")
    assert lines[-1].split() == ["unscale", "cpu", "1", "2.50", "2.50", "2.50"]
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n")
    assert len(list((tmp_path / "rehearsal").iterdir())) == 3


SAYS_ITS_NUMBER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
ENDLESS = f"""
import os, signal, sys

import torch

sys.path.insert(0, {str(ROOT / "bench")!r})
from gpu import __main__ as gpu, stages, targets
child = [sys.executable, "-c", {SAYS_ITS_NUMBER!r}]
stage = [sys.executable, "-c", f"import subprocess; subprocess.run({{child}})"]
os.environ["FAKE_CUDA_KERNELS"] = "here"
torch.cuda.is_available = lambda: True
targets.Rehearsal.stages = lambda self, groups: [stages.Stage("sleeps", stage, 60)]
signal.signal(signal.SIGTERM, gpu.stop)
sys.exit(gpu.main(["--dry-run", sys.argv[1]]))
"""


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_when_it_is_ended_no_stage_is_left_running(tmp_path):
    """Nor a child of one."""
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True) as run:
        lines = (line.strip() for line in run.stdout)
        child = int(next(line for line in lines if line.isdigit()))
        run.terminate()
        run.stdout.close()
        assert run.wait(20) == 128 + signal.SIGTERM
    assert ended(child)
    (summary,) = tmp_path.glob("rehearsal/*.summary.txt")
    lines = summary.read_text().splitlines()
    assert lines[2].startswith("sleeps           FAILED, interrupted (")
    assert lines[-1] == "nothing was measured"


def test_a_ledger_that_was_cut_off_has_no_table(tmp_path):
    ledger = tmp_path / "1.jsonl"
    assert gpu.table(ledger) == "nothing was measured"
    ledger.write_text('{"op": "uns')
    assert gpu.table(ledger).startswith(f"no table: {ledger}:1 is not a JSON object")


# ---- what the stages run -----------------------------------------------------------------------


def test_the_small_case_runs():
    small_case.small_case(torch.device("cpu"))


# ---- the plugin of pytest ----------------------------------------------------------------------

FAULTY = """
import sys, time
from types import SimpleNamespace

def synchronize():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_faults():
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    assert False, "the GPU said so"

def test_hangs():
    time.sleep(60)

def test_works():
    assert "torch" not in sys.modules
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is missing")
def test_a_test_that_faults_or_hangs_takes_no_other_with_it(tmp_path):
    (tmp_path / "test_some.py").write_text(FAULTY)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "gpu.gpu_fault", "--test-limit", "2"]
    command += ["-n", "1", "--dist", "worksteal", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "bench")
    assert "the GPU said so" in run.stdout
    for name in ("test_faults", "test_hangs"):
        assert re.search(rf"crashed while running '.*::{name}'", run.stdout)
    assert re.search(r'test_some.py", line \d+ in test_hangs', run.stdout + run.stderr)
    assert " 1 passed in " in run.stdout
