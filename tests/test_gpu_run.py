"""`make gpu`: its stages, what a failing one leaves of the others, and the summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import gpu
    import small_case
    import stages
    import targets

    return SimpleNamespace(gpu=gpu, stages=stages, targets=targets, small_case=small_case)


@pytest.fixture
def stage(bench) -> Callable:
    def make(name: str, code: str, limit: float = 60, **options: object):
        return bench.stages.Stage(name, [sys.executable, "-c", code], limit, **options)

    return make


def run_all(bench, path: Path, *stages, budget: float = 600) -> list[str]:
    """The summary's lines."""
    summary = bench.stages.Summary(path, "some GPU")
    bench.stages.run_all(list(stages), {}, budget, summary)
    assert summary.failed == ("FAILED" in path.read_text())
    return path.read_text().splitlines()


def test_a_failed_stage_leaves_the_others_their_results(bench, stage, tmp_path):
    """By exit status, time-out, crash, a program that is not there."""
    file = tmp_path / "made"
    lines = run_all(
        bench,
        tmp_path / "summary.txt",
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
    assert shown[4] == "works            ok"
    assert lines[-1].endswith(": 5 passed in 0.1s")
    assert "    | why" in lines
    assert "    | begun" in lines


def test_a_hanging_child_of_a_stage_is_ended_too(bench, stage, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"
    lines = run_all(bench, tmp_path / "summary.txt", stage("hangs", code, limit=1.5))
    assert lines[2].startswith("hangs            FAILED, out of time")


def test_what_is_missing_is_one_sentence(bench, stage, tmp_path):
    lines = run_all(
        bench,
        tmp_path / "summary.txt",
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
        tmp_path / "summary.txt",
        stage("greedy", SLEEPS, reserve=3),
        stage("later", "print('here')"),
        stage("never", "", reserve=1000),
        budget=4.5,
    )
    assert lines[2].startswith("greedy           FAILED, out of time after ")
    assert any(line.startswith("later            ok") for line in lines)
    assert lines[-1] == "never            left out, no time"


def test_advice_fails_nothing(bench, stage, tmp_path):
    lines = run_all(bench, tmp_path / "s.txt", stage("racecheck", "exit(1)", advisory=True))
    assert lines[2].startswith("racecheck        findings, exit status 1")


def targets_of(bench, tmp_path, monkeypatch) -> list:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    ledger = tmp_path / "some-gpu/2030-01-01-abc.jsonl"
    rehearsal = bench.targets.Rehearsal(ledger, device="cpu")
    return [bench.targets.Gpu(ledger), rehearsal]


def test_a_rehearsal_has_the_stages_of_a_gpu_run(bench, tmp_path, monkeypatch):
    on_gpu, rehearsed = (list(t.stages()) for t in targets_of(bench, tmp_path, monkeypatch))
    names = [stage.name for stage in on_gpu]
    assert names == [stage.name for stage in rehearsed]
    first = ["build", "doctor", "tests cuda", "tests triton", "probe", "demonstrations"]
    assert names[:10] == [*first, "memcheck", "racecheck", "synccheck", "bench unscale"]
    assert names[-2:] == ["history", "plots"]
    from registry import OPS

    assert {name.split()[1] for name in names if name.startswith("bench")} == set(OPS)
    for stage in [*on_gpu, *rehearsed]:
        place = next((word for word in stage.command if word.endswith(".py")), None)
        assert place is None or (stage.cwd / place).exists(), stage
    watched = [stage for stage in rehearsed if "compute-sanitizer" in stage.command]
    assert [bool(stage.missing) for stage in watched] == 3 * [True]
    asked = [stage for stage in rehearsed if "--device" in stage.command and not stage.missing]
    assert all(stage.command[stage.command.index("--device") + 1] == "cpu" for stage in asked)
    assert all("--quick" in s.command for s in rehearsed if s.name.startswith("bench"))
    assert not any("--quick" in s.command for s in on_gpu)


@pytest.mark.parametrize(
    ("capability", "arches"), [((8, 0), "8.0"), ((8, 9), "8.0;8.9"), ((9, 0), "8.0;9.0a")]
)
def test_builds_for_the_present_gpu(bench, capability: tuple[int, int], arches: str) -> None:
    assert bench.targets.arch_list(capability) == arches


def test_before_the_benchmarks_their_time_is_kept(bench, tmp_path, monkeypatch):
    target, _ = targets_of(bench, tmp_path, monkeypatch)
    stages = list(target.stages())
    first = next(i for i, stage in enumerate(stages) if stage.name.startswith("bench"))
    assert all(stage.reserve >= bench.targets.BENCHMARKS_S for stage in stages[:first])
    assert stages[0].limit + stages[0].reserve <= target.budget


@pytest.mark.parametrize("cut", [False, True], ids=["to the end", "interrupted"])
def test_a_rehearsal_with_broken_stages(bench, tmp_path, monkeypatch, capsys, cut):
    """From the command line to the summary, with the ledger and a table of what there is."""
    record = {"op": "unscale", "case": "1", "provider": "cpu", "ratio": 2.5, "utc": "2030-01-01"}
    record |= {"device": "cpu", "device_name": "Some CPU"}

    def stages(target):
        write = f"open({str(target.ledger)!r}, 'a').write({json.dumps(record)!r})"
        for name, code in (("build", "exit(1)"), ("bench unscale", write), ("plots", "exit(2)")):
            if cut and name == "plots":
                raise_interrupt = SimpleNamespace(name=name, said=[], run=interrupted)
                yield raise_interrupt
            else:
                yield bench.stages.Stage(name, [sys.executable, "-c", code], 60)

    def interrupted(env: dict, left: float) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.targets.Rehearsal, "stages", stages)
    if cut:
        with pytest.raises(KeyboardInterrupt):
            bench.gpu.main(["--dry-run", str(tmp_path)])
    else:
        assert bench.gpu.main(["--dry-run", str(tmp_path)]) == 1
        assert "REHEARSAL on the CPU" in capsys.readouterr().out
    (ledger,) = (tmp_path / "rehearsal").glob("*.jsonl")
    lines = ledger.with_suffix(".summary.txt").read_text().splitlines()
    assert lines[0].startswith("REHEARSAL on the CPU: no figure of it is a GPU's")
    assert lines[2].startswith("build            FAILED, exit status 1")
    assert lines[3].startswith("bench unscale    ok")
    assert lines[4].startswith("plots            FAILED, " + ("interr" if cut else "exit status 2"))
    assert lines[-1].split() == ["unscale", "cpu", "1", "2.50", "2.50", "2.50"]


def test_a_ledger_that_was_cut_off_has_no_table(bench, tmp_path):
    ledger = tmp_path / "1.jsonl"
    assert bench.gpu.table(ledger) == "nothing was measured"
    ledger.write_text('{"op": "uns')
    assert bench.gpu.table(ledger).startswith(f"no table: {ledger}:1 is not a JSON object")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(bench, capsys):
    assert bench.gpu.main([]) == 1
    assert "sees no GPU" in capsys.readouterr().err


def test_the_small_case_runs(bench):
    bench.small_case.small_case(torch.device("cpu"))
