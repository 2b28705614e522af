"""Compare measurements: with those of a ledger, and with those of another commit's amp_ext."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import amp_ext
import ledger
from table import geometric_mean, microseconds

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "build/base"
ROUNDS = 2
ROW = "{:<12}{:<40}{:<8}{:>10}{:>10}{:>7}{:>13}"
Key = tuple[object, ...]


class BuildError(Exception):
    """Another commit's amp_ext cannot be had."""


# ---- a ledger ----------------------------------------------------------------------------------


def key(record: dict) -> Key:
    """Of what may be compared: a case of a provider on a kind of machine."""
    provider = record["provider"]
    if provider == "amp_ext" and record["device"] == "cpu":
        provider = "cpu"
    return (
        *(record["op"], record["case"], provider),
        *(record["device_name"], record["threads"]),
    )


def is_slower(now: dict, before: dict) -> bool:
    """By more than the wider of the two measurements' spreads, from p20 to p80."""
    noise = max(record["p80_us"] - record["p20_us"] for record in (now, before))
    return now["p20_us"] - before["p20_us"] > noise


def against(measured: Iterable[dict], earlier: Iterable[dict]) -> tuple[list[str], int]:
    """Which of amp_ext's cases became slower.

    Returns:
        Lines to print, and the exit status: 1 where a case became slower, 2 where the ledger has
        none of the cases on this machine with as many threads. The last measurement of a ledger
        counts.
    """
    before = {key(record): record for record in earlier}
    pairs = [(now, before[key(now)]) for now in measured if key(now) in before]
    mine = [(now, then) for now, then in pairs if now["provider"] in ledger.OURS]
    if not mine:
        return ["the ledger has none of these cases, measured on this machine"], 2
    others = {
        (now["op"], now["case"]): now["p20_us"] / then["p20_us"]
        for now, then in pairs
        if now["provider"] == now["baseline"]
    }
    lines = [ROW.format("", "", "", "before us", "now us", "ratio", "baseline's")]
    slower = [(now, then) for now, then in mine if is_slower(now, then)]
    for now, then in slower:
        other = others.get((now["op"], now["case"]))
        lines.append(
            ROW.format(
                *(now["op"], now["case"], now["provider"]),
                *(microseconds(record["p20_us"]) for record in (then, now)),
                f"{then['p20_us'] / now['p20_us']:.2f}",
                f"{1 / other:.2f}" if other else "",
            ).rstrip()
        )
    lines.append(f"{len(slower)} of {len(mine)} measurements became slower than noise")
    return (lines if slower else lines[-1:]), int(bool(slower))


# ---- another commit ----------------------------------------------------------------------------


def git(*arguments: str, folder: Path = ROOT) -> str:
    command = ["git", "-C", str(folder), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout.strip()


def base_package(revision: str) -> Path:
    """The folder with a commit's amp_ext, built.

    It is a git worktree under build/, which stays, so that ninja compiles only what differs from
    the commit before. Where the sources of the module are those of this tree, its module is taken.

    Raises:
        BuildError: there is no such commit, or it cannot be built.
    """
    commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    git("worktree", "prune")
    if (BASE / ".git").exists():
        git("checkout", "--detach", "--force", commit, folder=BASE)
    else:
        shutil.rmtree(BASE, ignore_errors=True)
        git("worktree", "add", "--detach", str(BASE), commit)
    if git("diff", "--name-only", commit, "--", "csrc", "setup.py"):
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        if subprocess.run(command, cwd=BASE, stdout=sys.stderr).returncode:
            raise BuildError(f"{revision} does not build")
    else:
        package = Path(amp_ext.__file__).parent
        for file in (*package.glob("_C.*"), package / "_build_info.py"):
            shutil.copy(file, BASE / "amp_ext")
    return BASE


def run_apart(package: Path, arguments: Sequence[str], file: Path) -> None:
    """Run the benchmark on the amp_ext of a folder, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "bench/run.py"), *arguments, "--ours"]
    run = subprocess.run(
        [*command, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )
    if run.returncode not in (0, 1):  # 1: a case has failed, which its record says
        raise BuildError(f"{' '.join(command)}: exit status {run.returncode}")


def measure_both(
    revision: str, ops: Sequence[str], arguments: Sequence[str]
) -> tuple[list[list[dict]], list[list[dict]]]:
    """Each op on the base and on the present amp_ext, in turn: the records of each round."""
    packages = base_package(revision), Path(amp_ext.__file__).parents[1]
    sides: tuple[list[list[dict]], ...] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        for op in ops:
            for round_ in range(ROUNDS):
                for side, package in enumerate(packages):
                    file = Path(folder, f"{op}-{round_}-{side}.jsonl")
                    run_apart(package, [op, *arguments], file)
                    records = ledger.read(file) if file.exists() else []
                    while len(sides[side]) <= round_:
                        sides[side].append([])
                    sides[side][round_] += records
    return sides


def base_lines(
    base: Sequence[Sequence[dict]], now: Sequence[Sequence[dict]]
) -> tuple[list[str], int]:
    """The table of ratios base / now, each a geometric mean of the rounds, with their range.

    Returns:
        Its lines and the exit status: 1 where a case has failed on either side.
    """
    indexed = [[{key(r): r for r in round_} for round_ in side] for side in (base, now)]
    lines = [ROW.format("", "", "", "base us", "now us", "ratio", "of rounds")]
    ratios: dict[str, list[float]] = {}
    status = 0
    for k in dict.fromkeys(k for side in reversed(indexed) for round_ in side for k in round_):
        found = [[round_[k] for round_ in side if k in round_] for side in indexed]
        first = (found[1] or found[0])[0]
        if first["case"].startswith("limit") or first["provider"] not in ledger.OURS:
            continue
        name = first["op"], first["case"], first["provider"]
        lacking = reason(found)
        if lacking:
            status = 1
            lines.append(f"{name[0]:<12}{name[1]:<40}{name[2]:<8} NO RATIO, {lacking}")
            continue
        each = [b["p20_us"] / n["p20_us"] for b, n in zip(*found, strict=True)]
        mean = geometric_mean(each)
        if first["counted"]:
            ratios.setdefault(name[2], []).append(mean)
        shown = (microseconds(min(r["p20_us"] for r in side)) for side in found)
        lines.append(ROW.format(*name, *shown, f"{mean:.2f}", f"{min(each):.2f}..{max(each):.2f}"))
    lines += means(ratios)
    return lines, status


def reason(found: Sequence[Sequence[dict]]) -> str | None:
    """Why the rounds of a case on both sides give no ratio."""
    for side, name in zip(found, ("the base", "the present amp_ext"), strict=True):
        if len(side) < ROUNDS:
            return f"{name} cannot run it"
        if error := next((record["error"] for record in side if record["error"]), None):
            return f"{name}: {error}"
    return None


def means(ratios: dict[str, list[float]]) -> Iterator[str]:
    for provider, of in ratios.items():
        words = f"geometric mean of {len(of)} ratios base / now"
        yield ROW.format("", words, provider, "", "", f"{geometric_mean(of):.2f}", "")
