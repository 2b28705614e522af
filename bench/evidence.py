"""What the ledgers in a folder say: which lines count, where they come from, and their ratios."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ledger
from ledger import OURS

LIMIT = "limit"  # how the case of a table's first row begins
HISTORY = "history"


@dataclass(frozen=True)
class Run:
    """One op's lines of one ledger file; of a case measured twice, the last ones.

    Args:
        machine: the folder of the file.
        op: as on run.py's command line.
        records: in the file's order.
    """

    machine: str
    op: str
    records: tuple[dict, ...]

    @property
    def latest(self) -> str:
        """When its last line was written."""
        return max(str(record["utc"]) for record in self.records)

    @property
    def device(self) -> str:
        return self.records[-1]["device"]

    @property
    def device_name(self) -> str:
        return self.records[-1]["device_name"]

    @property
    def measured(self) -> tuple[dict, ...]:
        return tuple(r for r in self.records if not r["case"].startswith(LIMIT))

    @property
    def limits(self) -> tuple[dict, ...]:
        return tuple(r for r in self.records if r["case"].startswith(LIMIT))

    @property
    def command(self) -> str:
        """What wrote the lines, its file apart; derived where they are older than the key."""
        default = f"python bench/run.py {self.op} --device {self.device}"
        said = (
            re.sub(r" --(?:json|results)[ =]('[^']*'|\S+)", "", r["command"] or "")
            for r in self.records
        )
        return "; ".join(dict.fromkeys(words or default for words in said))

    @property
    def versions(self) -> str:
        return versions(self.records[-1])

    @cached_property
    def ratios(self) -> dict[str, Ratios]:
        """By provider: the ratios of amp_ext's, of the cases that are counted."""
        found: dict[str, dict[str, float]] = {}
        for record in self.measured:
            if record["provider"] in OURS and record["ratio"] and record["counted"]:
                found.setdefault(record["provider"], {})[record["case"]] = record["ratio"]
        return {provider: Ratios(cases) for provider, cases in found.items()}

    def baselines(self, provider: str) -> list[str]:
        """What a provider's counted ratios are to."""
        cases = self.ratios[provider].cases
        return sorted({r["baseline"] for r in self.measured if r["case"] in cases})


@dataclass(frozen=True)
class Ratios:
    """Ratios by case; above 1 amp_ext is faster."""

    cases: dict[str, float]

    @property
    def mean(self) -> float:
        """Geometric."""
        return math.exp(sum(map(math.log, self.cases.values())) / len(self.cases))

    @property
    def worst(self) -> str:
        return min(self.cases, key=self.cases.__getitem__)

    @property
    def best(self) -> str:
        return max(self.cases, key=self.cases.__getitem__)


def versions(record: dict) -> str:
    """ "torch 2.13.0+cpu, 2 threads, commit ed65038": whatever a line says of these."""
    parts = [
        f"{name} {record[name]}"
        for name in ("torch", "triton", "cuda", "driver")
        if record.get(name)
    ]
    if record.get("device") == "cpu" and record.get("threads"):
        parts.append(f"{record['threads']} threads")
    return ", ".join([*parts, f"commit {record.get('commit') or 'unknown'}"])


def files(results: Path) -> list[Path]:
    """The ledger files at a path, which may be one."""
    return sorted(results.rglob("*.jsonl")) if results.is_dir() else [results]


def newest(results: Path, quick: bool = False) -> list[Run]:
    """Of each machine and op the lines of the file that has the newest one.

    Lines of a run with --quick say little; they are left out, or with `quick` taken where a
    machine has no others.
    """
    chosen: dict[tuple[str, str], Run] = {}
    for file in files(results):
        for run in runs_of(file):
            before = chosen.get((run.machine, run.op))
            if (is_quick(run) and not quick) or (before and not precedes(before, run)):
                continue
            chosen[run.machine, run.op] = run
    return [chosen[key] for key in sorted(chosen)]


def is_quick(run: Run) -> bool:
    return "--quick" in run.command


def precedes(one: Run, other: Run) -> bool:
    """Whether the other one is to be taken."""
    return (not is_quick(one), one.latest) <= (not is_quick(other), other.latest)


def runs_of(file: Path) -> Iterator[Run]:
    by_op: dict[str, dict[tuple[str, str], dict]] = {}
    for record in ledger.read(file):
        by_op.setdefault(record["op"], {})[record["case"], record["provider"]] = record
    for op, records in by_op.items():
        yield Run(file.parent.name, op, tuple(records.values()))


def machines(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each machine, of GPUs first."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.device != "cuda", run.machine)):
        found.setdefault(run.machine, []).append(run)
    return found


def histories(results: Path) -> dict[str, list[dict]]:
    """By machine: the newest line of each provider that history.py wrote."""
    found: dict[str, dict[str, dict]] = {}
    for file in files(results):
        for line in file.read_text().splitlines():
            record = json.loads(line) if f'"{HISTORY}"' in line else {}
            if record.get("kind") == HISTORY:
                of_machine = found.setdefault(file.parent.name, {})
                before = of_machine.get(record["provider"])
                if before is None or before["utc"] <= record["utc"]:
                    of_machine[record["provider"]] = record
    return {machine: list(records.values()) for machine, records in found.items()}


def footer(runs: Sequence[Run]) -> list[str]:
    """The lines below a figure: machine, then versions and command of every run."""
    return [runs[0].device_name, *dict.fromkeys(f"{r.versions}: {r.command}" for r in runs)]


def ratio_text(ratio: float) -> str:
    """Three digits: 0.23, 1.05, 28.6, 154."""
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 99.95 else 0}f}"
