"""bench/base.py: a comparison with another commit."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from harness import base
from harness import ledger
import run
from bench_program import quiet, record, run_quick  # noqa: F401  (a fixture)


def timed(p20: float, **more: object) -> ledger.Record:
    return record(p20_us=p20, **more)


def test_base_lines() -> None:
    """Ratios of rounds, their geometric mean, and the mean over the cases that count."""
    good, bad = timed(5.0, case="b"), timed(5.0, case="b", error="CheckError: wrong")
    lines, status = base.compared(
        [timed(8.0), good, timed(2.0), bad],
        [timed(2.0), good, timed(2.0), good],
    )
    assert status == 1
    assert " ".join(lines[1].split()) == "unscale 7 x 7 cpu 2.00 2.00 2.00 1.00..4.00"
    assert lines[2].endswith("NO RATIO, the base: CheckError: wrong")
    assert " ".join(lines[3].split()) == "geometric mean of 1 ratios base / now cpu 2.00"
    assert all(len(line) <= 100 for line in lines)


def test_a_case_that_the_base_cannot_run() -> None:
    lines, status = base.compared([], 2 * [timed(2.0)])
    assert status == 1
    assert lines[1].endswith("NO RATIO, the base cannot run it")


def test_limits_and_others_are_not_compared() -> None:
    one = [timed(1.0, provider="copy", limit=True, error="wrong"), timed(1.0, provider="torch")]
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
        ledger.append(file, [timed(4.0 if side == "base" else 2.0)])

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
