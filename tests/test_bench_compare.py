"""bench/compare.py and base.py: against a ledger, and against another commit."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

import base
import compare
import ledger
import run
import timing
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)


def record(p20: float, p80: float, provider: str = "cpu", **more: object) -> dict:
    known = {"op": "unscale", "case": "a", "device": "cpu", "device_name": "X", "threads": 2}
    times = {"p20_us": p20, "p50_us": (p20 + p80) / 2, "p80_us": p80}
    return {**ledger.DEFAULTS, **known, "provider": provider, **times, **more}


# ---- a ledger ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "before", "slower"),
    [
        ((13.0, 14.0), (10.0, 12.0), True),  # by 3, more than either spread
        ((12.0, 13.0), (10.0, 12.0), False),  # by as much as the spread before
        ((13.0, 17.0), (10.0, 11.0), False),  # by less than the spread now
        ((9.0, 9.1), (10.0, 10.1), False),
    ],
)
def test_slower_than_noise(now, before, slower) -> None:
    assert compare.is_slower(record(*now), record(*before)) == slower
    lines, status = compare.against([record(*now)], [record(*before)])
    assert status == slower
    assert lines[-1] == f"{int(slower)} of 1 measurements became slower than noise"


def test_what_became_slower_is_shown_beside_the_baseline() -> None:
    earlier = [record(99.0, 99.0), record(10.0, 11.0), record(20.0, 21.0, "torch")]
    now = [record(20.0, 21.0), record(25.0, 26.0, "torch"), record(1.0, 1.0, case="new")]
    (_, line, _), status = compare.against(now, earlier)
    assert status == 1
    assert line.split() == ["unscale", "a", "cpu", "10.00", "20.00", "0.50", "0.80"]
    assert len(line) <= 100


@pytest.mark.parametrize(
    "other", [{"device_name": "Y"}, {"threads": 1}, {"case": "b"}, {"calls": 7}]
)
def test_other_machines_and_cases_are_no_comparison(other) -> None:
    lines, status = compare.against([record(20.0, 21.0)], [record(10.0, 11.0, **other)])
    assert (lines, status) == (
        ["the ledger has none of these cases, measured on this machine"],
        2,
    )


def test_threads_of_a_gpus_host_do_not_matter() -> None:
    now, then = (record(5.0, 5.0, device="cuda", threads=threads) for threads in (2, 16))
    assert compare.against([now], [then])[1] == 0


@pytest.mark.parametrize(("now", "before"), [("wrong", None), (None, "wrong")])
def test_wrong_results_are_no_yardstick(now, before) -> None:
    assert (
        compare.against([record(20.0, 21.0, error=now)], [record(1.0, 1.0, error=before)])[1] == 2
    )


@pytest.mark.parametrize(("before", "status"), [(5.0, 1), (10.0, 0)])
def test_run_against(tmp_path: Path, capsys, monkeypatch, before: float, status: int) -> None:
    """The exit status is 1 where a case became slower; only amp_ext's lines are counted."""

    def pretend(providers, budget, events) -> dict[str, timing.Quantiles]:
        return {provider.name: timing.Quantiles(us, us + 1, us + 2) for provider in providers}

    monkeypatch.setattr(timing, "interleaved", pretend)
    options = ("unscale", "--filter", "2 x 10")
    file = tmp_path / "before.jsonl"
    us = before
    run_quick(file, *options)
    us = 10.0
    assert run_quick(tmp_path / "now.jsonl", *options, "--against", str(file))[0] == status
    printed = capsys.readouterr().out
    assert f"against {file}" in printed
    assert printed.splitlines()[-1] == f"{status} of 1 measurements became slower than noise"


# ---- another commit ----------------------------------------------------------------------------


def test_base_lines() -> None:
    """Ratios of rounds, their geometric mean, and the mean over the cases that count."""
    good, bad = record(5.0, 5.0, case="b"), record(5.0, 5.0, case="b", error="CheckError: wrong")
    lines, status = base.compared(
        [record(8.0, 9.0), good, record(2.0, 3.0), bad],
        [record(2.0, 3.0), good, record(2.0, 3.0), good],
    )
    assert status == 1
    assert lines[1].split() == ["unscale", "a", "cpu", "2.00", "2.00", "2.00", "1.00..4.00"]
    assert lines[2].endswith("NO RATIO, the base: CheckError: wrong")
    assert " ".join(lines[3].split()) == "geometric mean of 1 ratios base / now cpu 2.00"
    assert all(len(line) <= 100 for line in lines)


def test_a_case_that_the_base_cannot_run() -> None:
    lines, status = base.compared([], 2 * [record(2.0, 3.0)])
    assert status == 1
    assert lines[1].endswith("NO RATIO, the base cannot run it")


def test_limits_and_others_are_not_compared() -> None:
    one = [record(1.0, 1.0, "copy", case="copy", limit=True), record(1.0, 1.0, "torch")]
    lines, status = base.compared(2 * one, 2 * one)
    assert (len(lines), status) == (1, 0)


def repository(folder: Path) -> Path:
    """With one commit: an amp_ext whose module "builds" by a copy."""
    (folder / "amp_ext").mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "amp_ext/__init__.py").write_text("")
    (folder / "csrc/a.cpp").write_text("1")
    (folder / "triton_kernels").mkdir()
    (folder / "triton_kernels/gemm.py").write_text("1")
    (folder / "setup.py").write_text("open('amp_ext/_C.so', 'w').write(open('csrc/a.cpp').read())")
    (folder / ".gitignore").write_text("/build/\n*.so\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, *command], cwd=folder, check=True)
    return folder


def test_base_is_built_from_its_own_sources(tmp_path: Path) -> None:
    root = repository(tmp_path / "repository")
    tree = root / "build/base"
    (root / "csrc/a.cpp").write_text("2")
    (root / "triton_kernels/gemm.py").write_text("2")
    for _ in range(2):  # the worktree is there the second time
        assert base.base_package("HEAD", root) == tree
        assert (tree / "amp_ext/_C.so").read_text() == "1"
        assert (tree / "amp_ext/triton_kernels/gemm.py").read_text() == "1"
    with pytest.raises(base.BuildError, match="git rev-parse"):
        base.base_package("absent", root)
    (root / "setup.py").write_text("raise SystemExit(1)")
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "second"]
    subprocess.run(commit, cwd=root, check=True)
    (root / "csrc/a.cpp").write_text("3")
    with pytest.raises(base.BuildError, match="HEAD does not build"):
        base.base_package("HEAD", root)


def test_base_with_the_same_sources_takes_the_module(tmp_path: Path, monkeypatch) -> None:
    """And both sides run in turn, each on its own amp_ext."""
    root = repository(tmp_path / "repository")
    monkeypatch.setattr(base, "base_package", partial(base.base_package, root=root))
    base.base_package("HEAD")
    assert list((root / "build/base/amp_ext").glob("_C.*"))
    assert (root / "build/base/amp_ext/_build_info.py").exists()

    ran: list[tuple[str, str]] = []

    def pretend(package: Path, arguments, file: Path) -> None:
        side = "base" if package == root / "build/base" else "now"
        ran.append((arguments[0], side))
        ledger.append(file, [record(4.0 if side == "base" else 2.0, 5.0)])

    monkeypatch.setattr(base, "run_apart", pretend)
    before, now = base.measure_both("HEAD", ["unscale", "cast"], ["--quick"])
    turns = ["base", "now", "base", "now"]
    assert ran == [(op, side) for op in ("unscale", "cast") for side in turns]
    assert [record["p20_us"] for record in before] == 4 * [4.0]
    assert [record["p20_us"] for record in now] == 4 * [2.0]


def test_base_of_the_program(tmp_path: Path, capsys, monkeypatch) -> None:
    """The present amp_ext as its own base."""
    here = Path(base.amp_ext.__file__).parents[1]
    monkeypatch.setattr(base, "base_package", lambda revision: here)
    monkeypatch.setattr(base, "ROUNDS", 1)
    options = ("update", "--filter", "1 found_inf, scale moved", "--base", "HEAD", "--seconds", "0")
    status, records = run_quick(tmp_path / "out.jsonl", *options)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert [r["provider"] for r in records] == 2 * ["torch", "cpu"]
    assert "amp_ext of HEAD over that of this tree" in printed
    assert printed.splitlines()[-1].split()[:3] == ["geometric", "mean", "of"]


def test_an_op_without_the_cases_leaves_the_others(tmp_path: Path, capsys, monkeypatch) -> None:
    """Of BF16 the scale has no case."""
    here = Path(base.amp_ext.__file__).parents[1]
    monkeypatch.setattr(base, "base_package", lambda revision: here)
    monkeypatch.setattr(base, "ROUNDS", 1)
    options = ["--dtype", "bf16", "--filter", "2 x 10", "--base", "HEAD", "--seconds", "0"]
    status, records = run_quick(tmp_path / "out.jsonl", "update", "cast", *options)
    assert status == 0, capsys.readouterr().out
    assert {record["op"] for record in records} == {"cast"}
    assert run_quick(tmp_path / "none.jsonl", "update", *options) == (2, [])


def test_no_such_base(capsys) -> None:
    assert run.main(["update", "--device", "cpu", "--base", "no-such-commit"]) == 2
    assert "--base no-such-commit: git rev-parse" in capsys.readouterr().err
