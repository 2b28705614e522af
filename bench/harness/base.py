"""Run the benchmarks on another commit's amp_ext too, built apart, and compare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median

import amp_ext
from harness import ledger
from harness.table import microseconds

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3  # the median leaves out one in which the processor's speed changed
ROW = "{:<12}{:<40}{:<8}{:>10}{:>10}{:>7}{:>13}"


class BuildError(Exception):
    """Another commit's amp_ext cannot be had."""


def git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"git could not be started: {error}") from error
    if run.returncode:
        raise BuildError(f"git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout.strip()


def copy_module(package: Path, to: Path) -> None:
    """The compiled module of a package's folder, its libraries and what it knows of its build: into
    another's.
    """
    for file in (*package.glob("*.so"), package / "_build_info.py"):
        shutil.copy(file, to)


def base_package(revision: str, root: Path = ROOT) -> Path:
    """The folder with a commit's amp_ext, built.

    It is a git worktree under build/, which stays, so that ninja compiles only what differs from
    the commit before. Where the sources of the module are those of this tree, its module is taken.

    Args:
        revision: of the repository at `root`.
        root: the repository.

    Raises:
        BuildError: there is no such commit, or it cannot be built.
    """
    base = root / "build/base"
    commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", folder=root)
    git("worktree", "prune", folder=root)
    if (base / ".git").exists():
        git("checkout", "--detach", "--force", commit, folder=base)
    else:
        shutil.rmtree(base, ignore_errors=True)
        git("worktree", "add", "--detach", str(base), commit, folder=root)
    changed = git("diff", "--name-only", commit, "--", "csrc", "setup.py", folder=root)
    if changed or git("ls-files", "--others", "--exclude-standard", "--", "csrc", folder=root):
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        if subprocess.run(command, cwd=base, stdout=sys.stderr).returncode:
            raise BuildError(f"{revision} does not build")
    else:
        copy_module(Path(amp_ext.__file__).parent, base / "amp_ext")
    install_triton_kernels(base)
    return base


def install_triton_kernels(tree: Path) -> None:
    """Where an installation has them, so that none of another tree is found instead."""
    inside = tree / "amp_ext/triton_kernels"
    shutil.rmtree(inside, ignore_errors=True)
    if (tree / "triton_kernels").is_dir():
        shutil.copytree(tree / "triton_kernels", inside)


def run_apart(package: Path, arguments: Sequence[str], file: Path) -> None:
    """Run the benchmark on the amp_ext of a folder, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "bench/run.py"), *arguments, "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    # 1: a case has failed, which its record says; 2: the op has none of the cases.
    if run.returncode not in (0, 1, 2) or (run.returncode == 1 and not file.exists()):
        raise BuildError(f"{' '.join(command)}: exit status {run.returncode}")


def measure_both(
    revision: str, ops: Sequence[str], arguments: Sequence[str]
) -> tuple[list[dict], list[dict]]:
    """The records of both: each op on the base's amp_ext and on the present one, in turn."""
    packages = base_package(revision), Path(amp_ext.__file__).parents[1]
    sides: tuple[list[dict], list[dict]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        for op in ops:
            for round_ in range(ROUNDS):
                for side, package in enumerate(packages):
                    file = Path(folder, f"{op}-{round_}-{side}.jsonl")
                    run_apart(package, [op, *arguments], file)
                    if file.exists():
                        sides[side].extend(ledger.read(file))
    return sides


def compared(base: Sequence[dict], now: Sequence[dict]) -> tuple[list[str], int]:
    """The table of times and of ratios base / now, medians of the rounds, and the ratios' range.

    Returns:
        Its lines and the exit status: 1 where a case has failed on either side.
    """
    before, after = rounds(base), rounds(now)
    lines = [ROW.format("", "", "", "base us", "now us", "ratio", "of rounds")]
    ratios: dict[str, list[float]] = {}
    status = 0
    for name in dict.fromkeys([*after, *before]):
        found = before.get(name, []), after.get(name, [])
        lacking = reason(*found)
        if lacking:
            status = 1
            lines.append(f"{name[0]:<12}{name[1]:<40}{name[2]:<8} NO RATIO, {lacking}")
            continue
        each = [b["p20_us"] / n["p20_us"] for b, n in zip(*found, strict=True)]
        ratio = median(each)
        if found[1][0]["counted"]:
            ratios.setdefault(name[2], []).append(ratio)
        shown = (microseconds(median(record["p20_us"] for record in side)) for side in found)
        spread = f"{min(each):.2f}..{max(each):.2f}"
        lines.append(ROW.format(*name, *shown, f"{ratio:.2f}", spread))
    for provider, of in ratios.items():
        words = f"geometric mean of {len(of)} ratios base / now"
        lines.append(ROW.format("", words, provider, "", "", f"{geometric_mean(of):.2f}", ""))
    return lines, status


def rounds(records: Sequence[dict]) -> dict[tuple[str, str, str], list[dict]]:
    """The rounds of each of amp_ext's cases, by op, case and provider."""
    found: dict[tuple[str, str, str], list[dict]] = {}
    for record in records:
        mine = record["provider"] in ledger.OURS or record["error"]  # of a case that was not built
        if mine and not record["limit"]:
            name = record["op"], record["case"], record["provider"]
            found.setdefault(name, []).append(record)
    return found


def reason(base: Sequence[dict], now: Sequence[dict]) -> str | None:
    """Why the rounds of a case on both sides give no ratio."""
    for side, name in ((base, "the base"), (now, "the present amp_ext")):
        if error := next((record["error"] for record in side if record["error"]), None):
            return f"{name}: {error}"
        if len(side) < ROUNDS:
            return f"{name} cannot run it"
    return None
