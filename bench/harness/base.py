"""Build the amp_ext of another commit, run the benchmarks on both, and compare."""

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
ROUNDS = 3  # the median leaves out a round with another speed of the processor


class BuildError(Exception):
    """Report that another commit's amp_ext cannot be built."""


def git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"git could not be started: {error}") from error
    if run.returncode:
        raise BuildError(f"git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout.strip()


def base_package(revision: str, root: Path = ROOT) -> Path:
    """Build a commit's amp_ext; return its folder.

    The folder is a git worktree under build/. It stays, so that only the differences to the last
    commit are compiled. If the module's sources equal this tree's, its module is copied.

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
        package = Path(amp_ext.__file__).parent
        for file in (*package.glob("*.so"), package / "_build_info.py"):
            shutil.copy(file, base / "amp_ext")
    # The kernels go where an installation has them: Python would find another tree's.
    inside = base / "amp_ext/triton_kernels"
    shutil.rmtree(inside, ignore_errors=True)
    if (base / "triton_kernels").is_dir():
        shutil.copytree(base / "triton_kernels", inside)
    return base


def run_apart(package: Path, arguments: Sequence[str], file: Path) -> None:
    """Run the benchmark on the amp_ext of a folder, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "bench/run.py"), *arguments, "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    # 1: a case has failed, as its record shows; 2: no op has the cases.
    if run.returncode not in (0, 1, 2) or (run.returncode == 1 and not file.exists()):
        raise BuildError(f"{' '.join(command)}: exit status {run.returncode}")


def measure_both(revision: str, arguments: Sequence[str]) -> tuple[list[dict], list[dict]]:
    """Run the benchmark on the base's amp_ext and on the present one, in turn."""
    packages = base_package(revision), Path(amp_ext.__file__).parents[1]
    sides: tuple[list[dict], list[dict]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(ROUNDS):
            for side, package in enumerate(packages):
                file = Path(folder, f"{round_}-{side}.jsonl")
                run_apart(package, arguments, file)
                if file.exists():
                    sides[side].extend(ledger.read(file))
    return sides


def compared(
    base: Sequence[dict], now: Sequence[dict]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Compare the medians of the rounds.

    Returns:
        Headers and rows of a table, and the reasons for missing ratios.
    """
    found: dict[tuple[str, str, str], tuple[list[dict], list[dict]]] = {}
    for side, records in enumerate((base, now)):
        for record in records:
            # A case that was not built has an error of its baseline.
            mine = record["provider"] in ledger.OURS or record["error"]
            if mine and not record["limit"]:
                name = record["case"], record["provider"], record["op"]
                found.setdefault(name, ([], []))[side].append(record)
    headers = ["case", "provider", "op", "base us", "now us", "ratio", "of rounds"]
    rows, reasons = [], []
    ratios: dict[str, list[float]] = {}
    for (case, provider, op), sides in found.items():
        if lacking := reason(*sides):
            reasons.append(f"NO RATIO for {op}, {case}, {provider}: {lacking}")
            continue
        each = [b["p20_us"] / n["p20_us"] for b, n in zip(*sides, strict=True)]
        ratio = median(each)
        if sides[1][0]["counted"]:
            ratios.setdefault(provider, []).append(ratio)
        times = [microseconds(median(record["p20_us"] for record in side)) for side in sides]
        spread = f"{min(each):.2f}..{max(each):.2f}"
        rows.append([case, provider, op, *times, f"{ratio:.2f}", spread])
    for provider, counted in ratios.items():
        words = f"geometric mean of {len(counted)} ratios base / now"
        rows.append([words, provider, "", "", "", f"{geometric_mean(counted):.2f}", ""])
    return headers, rows, reasons


def reason(base: Sequence[dict], now: Sequence[dict]) -> str | None:
    """Return the reason why the rounds of a case give no ratio, or None."""
    for side, name in ((base, "the base"), (now, "the present amp_ext")):
        if error := next((record["error"] for record in side if record["error"]), None):
            return f"{name}: {error}"
        if len(side) < ROUNDS:
            return f"{name} cannot run it"
    return None
