"""`make gpu`: its stages, what a failing one leaves of the others, and the summary."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_program import record

ROOT = Path(__file__).resolve().parents[1]
SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"
GROUPS = ("tests", "checks", "bench")


@pytest.fixture
def bench() -> SimpleNamespace:
    import gpu
    from gpu import stages
    from gpu import targets

    return SimpleNamespace(gpu=gpu, stages=stages, targets=targets)


@pytest.fixture
def stage(bench) -> Callable:
    def make(name: str, code: str, limit: float = 60, **options: object):
        return bench.stages.Stage(name, [sys.executable, "-c", code], limit, **options)

    return make


@pytest.fixture
def targets(bench, tmp_path, monkeypatch) -> SimpleNamespace:
    """A run on a GPU, which is made up, and its rehearsal."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    return SimpleNamespace(
        gpu=bench.targets.Gpu.of(tmp_path), rehearsal=bench.targets.Rehearsal.of(tmp_path)
    )


def run_all(bench, folder: Path, *stages, budget: float = 600) -> list[str]:
    """The summary's lines."""
    summary = bench.stages.Summary(folder / "summary.txt", "some GPU")
    end = time.monotonic() + budget
    bench.stages.run_all(stages, {}, end, summary, folder / "log")
    assert summary.failed == ("FAILED" in summary.text)
    return summary.path.read_text().splitlines()


# ---- stages ------------------------------------------------------------------------------------


def test_a_failed_stage_leaves_the_others_their_results(bench, stage, tmp_path):
    """By exit status, time-out, crash, a program that is not there."""
    file = tmp_path / "made"
    lines = run_all(
        bench,
        tmp_path,
        stage("exits", "print('why'); raise SystemExit(3)"),
        stage("hangs", SLEEPS, limit=0.5),
        stage("crashes", "import os; os.abort()"),
        bench.stages.Stage("absent", [str(tmp_path / "no program")], 60),
        stage("works", f"open({str(file)!r}, 'w'); print('5 passed in 0.1s')"),
    )
    assert file.exists()
    shown = [line.rpartition(" (")[0] for line in lines if "(" in line and "|" not in line]
    assert shown[0] == "exits            FAILED, exit status 3"
    assert shown[1] == "hangs            FAILED, out of time after 0 s"
    assert shown[2] == "crashes          FAILED, killed by SIGABRT"
    assert shown[3].startswith("absent           FAILED, it could not be started: [Errno 2]")
    assert shown[4] == "works            ok, 5 passed in 0.1s"
    assert "    | why" in lines
    assert "    | begun" in lines


def test_what_failed_is_in_the_summary_and_everything_in_the_log(bench, stage, tmp_path):
    said = ["FAILED test_a.py::test_b[1] - assert 0", '  File "/work/tests/test_a.py", line 3']
    said += [f"word {number}" for number in range(100)]
    lines = run_all(
        bench, tmp_path, stage("fails", f"print({chr(10).join(said)!r}); exit(1)"), stage("ok", "")
    )
    kept = [line.removeprefix("    | ") for line in lines if line.startswith("    | ")]
    assert kept == [*said[:2], *said[-12:]]
    logged = (tmp_path / "log").read_text().splitlines()
    assert [line for line in logged if line in said] == said
    assert [line for line in logged if line.startswith("== ok  ")]


def test_a_hanging_child_of_a_stage_is_ended_too(bench, stage, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"
    lines = run_all(bench, tmp_path, stage("hangs", code, limit=1.5))
    assert lines[2].startswith("hangs            FAILED, out of time")


def test_what_is_missing_is_one_sentence(bench, stage, tmp_path):
    lines = run_all(
        bench,
        tmp_path,
        stage("one", "", needs=("json", "no_such_module")),
        stage("two", "", needs=("no_such_module", "nor_this")),
        stage("tool", "", missing="compute-sanitizer is not installed"),
    )
    assert lines[2:] == [
        "one              left out, no_such_module is not installed",
        "two              left out, no_such_module and nor_this are not installed",
        "tool             left out, compute-sanitizer is not installed",
    ]


def test_a_budget_is_kept_and_time_reserved(bench, stage, tmp_path):
    lines = run_all(
        bench,
        tmp_path,
        stage("greedy", SLEEPS, reserve=15),
        stage("later", "print('here')"),
        stage("never", "", reserve=1000),
        budget=17.0,
    )
    assert lines[2].startswith("greedy           FAILED, out of time after ")
    assert any(line.startswith("later            ok") for line in lines)
    assert lines[-1] == "never            left out, no time"


def test_stages_obey_interrupts_that_the_run_ignores(bench, stage, tmp_path):
    """As a run in the background does: a stage out of time can still say what it has found."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lines = run_all(bench, tmp_path, stage("sleeps", SLEEPS), budget=3.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines[2].startswith("sleeps           FAILED, out of time after ")
    assert lines[-1] == "    | KeyboardInterrupt"


def test_advice_fails_nothing(bench, stage, tmp_path):
    lines = run_all(bench, tmp_path, stage("racecheck", "exit(1)", advisory=True))
    assert lines[2].startswith("racecheck        findings, exit status 1")


def test_a_second_run_leaves_the_summary_of_the_first(bench, stage, tmp_path):
    for name in ("first", "second"):
        lines = run_all(bench, tmp_path, stage(name, ""))
    assert [line.split()[0] for line in lines if " ok " in line] == ["first", "second"]


# ---- targets -----------------------------------------------------------------------------------


def test_a_rehearsal_has_the_stages_of_a_gpu_run(targets):
    on_gpu, rehearsed = (list(t.stages(GROUPS)) for t in (targets.gpu, targets.rehearsal))
    assert [stage.name for stage in on_gpu] == [stage.name for stage in rehearsed]
    for stage in [*on_gpu, *rehearsed]:
        files = [w for w in stage.command if w.endswith(".py") and not w.startswith("-")]
        assert all((stage.cwd / file).exists() for file in files), stage
    watched = [stage for stage in rehearsed if "compute-sanitizer" in stage.command]
    assert [bool(stage.missing) for stage in watched] == 3 * [True]
    asked = [s for s in rehearsed if "--device" in s.command and s not in watched]
    devices = {stage.command[stage.command.index("--device") + 1] for stage in asked}
    assert devices == {"cpu", "simt"}
    assert all("--quick" in s.command for s in rehearsed if s.name.startswith("bench"))
    assert not any("--quick" in s.command for s in on_gpu)


def test_the_most_wanted_come_first(targets):
    stages = list(targets.gpu.stages(GROUPS))
    names = [stage.name for stage in stages]
    assert names[:4] == ["build", "doctor", "tests lists", "tests products"]
    assert names.index("probe") < names.index("triton lists")
    assert names[names.index("bench unscale") - 1] == "racecheck"
    from harness.registry import OPS

    assert {name.split()[1] for name in names if name.startswith("bench")} == set(OPS)
    cheap = sum(s.limit for s in stages[names.index("bench unscale") :][:7])
    assert cheap <= stages[0].reserve  # unscale to update, with gemm's first half


def test_before_the_benchmarks_their_time_is_kept(bench, targets):
    stages = list(targets.gpu.stages(GROUPS))
    assert all(s.reserve >= bench.targets.BENCHMARKS_S for s in stages if s.group != "bench")
    assert stages[0].limit + stages[0].reserve <= bench.gpu.BUDGET


@pytest.mark.parametrize("group", GROUPS)
def test_one_group_alone(targets, group: str) -> None:
    build, *others = targets.gpu.stages([group])
    assert build.name == "build"
    assert {stage.group for stage in others} == {group}
    assert (build.reserve > 0) == (group == "bench")


def test_every_test_of_a_gpu_is_in_one_stage(bench):
    """The files with tests of the cuda executor, and those that need a GPU otherwise."""
    t = bench.targets
    left_out = [word.partition("=")[2] for word in t.LISTS.where]
    for path in (ROOT / "tests").glob("test_*.py"):
        places = [tests for tests in (t.PRODUCTS, t.TILES, t.DEMOS) if path.name in tests.where]
        places += [t.LISTS] * (not any(fnmatch.fnmatch(path.name, name) for name in left_out))
        own = re.match(r"test_(bench|cuda_check|triton_check|package)", path.name)
        assert len(places) == (0 if own else 1), path.name
    for tests in (t.TILES, t.LIBRARY, t.DEMOS):
        assert all((ROOT / "tests" / name).exists() for name in tests.where)
    for name in ("test_fp16_ops_on_a_gpu", "test_fastest"):
        texts = [(ROOT / "tests" / file).read_text() for file in t.LIBRARY.where]
        assert sum(f"def {name}(" in text for text in texts) == 1


def test_tests_need_no_xdist(bench, targets, monkeypatch):
    command = targets.gpu.tests(bench.targets.LISTS)
    assert ("-n" in command) == (importlib.util.find_spec("xdist") is not None)
    monkeypatch.setattr(bench.targets.importlib.util, "find_spec", lambda name: None)
    assert "-n" not in targets.gpu.tests(bench.targets.LISTS)


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "8.0"), ((8, 9), "8.9"), ((9, 0), "9.0a"), ((12, 0), "12.0a")]
)
def test_builds_for_the_present_gpu(bench, capability: tuple[int, int], arch: str) -> None:
    assert bench.targets.architecture(capability) == arch


def test_the_callers_choice_of_kernels_is_not_taken(targets, monkeypatch):
    choices = {"TRITON_INTERPRET", "AMP_EXT_BACKEND", "AMP_EXT_GEMM"}
    for name in choices:
        monkeypatch.setenv(name, "1")
    assert not choices & targets.gpu.environment().keys()
    assert targets.rehearsal.environment()["TRITON_INTERPRET"] == "1"


def test_the_files_lie_in_the_folder_of_the_gpu(targets, tmp_path):
    from harness.environment import commit

    assert targets.gpu.ledger.parent == tmp_path / "some-gpu"
    assert targets.gpu.ledger.stem.endswith(f"-{commit() or 'unknown'}")
    assert targets.rehearsal.ledger.parent == tmp_path / "rehearsal"


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def rehearse(bench, stage, tmp_path, monkeypatch) -> Callable:
    """Run the command with other stages; the exit status and the summary's lines."""

    def measured(target) -> None:
        target.ledger.write_text(json.dumps(record(ratio=2.5)))

    def run(*stages, arguments: Sequence[str] = ()) -> tuple[int, list[str]]:
        def chosen(target, groups):
            measured(target)
            return iter(stages)

        monkeypatch.setattr(bench.targets.Rehearsal, "stages", chosen)
        status = bench.gpu.main(["--dry-run", str(tmp_path), *arguments])
        (file,) = tmp_path.glob("rehearsal/*.summary.txt")
        return status, file.read_text().splitlines()

    return run


def test_from_the_command_line_to_the_table(rehearse, stage, tmp_path, capsys):
    broken = stage("build", "exit(1)"), stage("bench unscale", ""), stage("bench norm", "exit(2)")
    status, lines = rehearse(*broken)
    assert status == 1
    assert lines[0].startswith("REHEARSAL on the CPU: no figure of it is a GPU's")
    assert lines[2].startswith("build            FAILED, exit status 1")
    assert lines[3].startswith("bench unscale    ok")
    assert lines[4].startswith("bench norm       FAILED, exit status 2")
    assert lines[-1].split() == ["unscale", "cpu", "1", "2.50", "2.50", "2.50"]
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n")
    assert len(list((tmp_path / "rehearsal").iterdir())) == 3


def test_a_run_without_failures(rehearse, stage):
    status, lines = rehearse(stage("build", ""))
    assert status == 0
    assert lines[2].startswith("build            ok (")


def test_the_budget_is_the_callers(rehearse, stage):
    status, lines = rehearse(stage("build", ""), arguments=["--budget", "0"])
    assert status == 0
    assert lines[2] == "build            left out, no time"


def test_an_unknown_group_is_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.gpu.main(["--only", "tests,benches"])
    assert "benches: choose from build, tests, checks, bench" in capsys.readouterr().err


ENDLESS = f"""
import signal, sys
sys.path.insert(0, {str(ROOT / "bench")!r})
import gpu, stages, targets
child = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
targets.Rehearsal.stages = lambda self, groups: [stages.Stage("sleeps", child, 60)]
signal.signal(signal.SIGTERM, gpu.stop)
sys.exit(gpu.main(["--dry-run", sys.argv[1]]))
"""


def obey_interrupts() -> None:
    """In a child: a job in the background inherits them as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="a killed process takes its child on Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_it_is_ended_no_stage_is_left_running(tmp_path, number):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    pipe = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": obey_interrupts}
    with subprocess.Popen(command, cwd=ROOT / "tests", **pipe) as run:
        lines = (line.strip() for line in run.stdout)
        child = int(next(line for line in lines if line.isdigit()))
        os.kill(run.pid, number)
        run.stdout.close()
        status = run.wait(20)
    deadline = time.monotonic() + 10
    while not ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(child)
    if number == signal.SIGKILL:
        return
    assert status == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}[number]
    (summary,) = tmp_path.glob("rehearsal/*.summary.txt")
    lines = summary.read_text().splitlines()
    assert lines[2].startswith("sleeps           FAILED, interrupted (")
    assert lines[-1] == "nothing was measured"


def test_a_ledger_that_was_cut_off_has_no_table(bench, tmp_path):
    ledger = tmp_path / "1.jsonl"
    assert bench.gpu.table(ledger) == "nothing was measured"
    ledger.write_text('{"op": "uns')
    assert bench.gpu.table(ledger).startswith(f"no table: {ledger}:1 is not a JSON object")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(bench, capsys):
    assert bench.gpu.main([]) == 1
    assert "sees no GPU" in capsys.readouterr().err


# ---- what the stages run -----------------------------------------------------------------------


def test_the_small_case_runs(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # it would set that for good
    from gpu import small_case

    small_case.small_case(torch.device("cpu"))
