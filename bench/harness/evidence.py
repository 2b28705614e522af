"""What the ledgers in a folder say: of each case its newest measurement, and the ratios."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

from harness import ledger
from harness.ledger import FP32_LINE, OURS, Record


@dataclass(frozen=True)
class Ratios:
    """Ratios by case; above 1 amp_ext is faster."""

    cases: dict[str, float]

    @property
    def mean(self) -> float:
        """Geometric."""
        return geometric_mean(self.cases.values())

    @property
    def worst(self) -> str:
        return min(self.cases, key=self.cases.__getitem__)

    @property
    def best(self) -> str:
        return max(self.cases, key=self.cases.__getitem__)


@dataclass(frozen=True)
class Run:
    """The newest lines of one op on one machine.

    Args:
        machine: the folder of the ledgers.
        op: as on run.py's command line.
        records: in the order of their dates.
    """

    machine: str
    op: str
    records: tuple[Record, ...]

    @property
    def on_gpu(self) -> bool:
        return self.records[-1]["device"] == "cuda"

    @property
    def device_name(self) -> str:
        return self.records[-1]["device_name"]

    @property
    def measured(self) -> list[Record]:
        return [record for record in self.records if not record["limit"]]

    @property
    def limits(self) -> list[Record]:
        return [record for record in self.records if record["limit"]]

    @property
    def sources(self) -> list[str]:
        """Versions, date and command of its lines, each once."""
        return list(dict.fromkeys(map(source, self.records)))

    @cached_property
    def ratios(self) -> dict[str, Ratios]:
        """amp_ext's ratios of the cases that are counted, by provider."""
        found: dict[str, dict[str, float]] = {}
        for record in self.measured:
            if record["provider"] in OURS and record["ratio"] and record["counted"]:
                found.setdefault(record["provider"], {})[record["case"]] = record["ratio"]
        return {provider: Ratios(cases) for provider, cases in found.items()}

    @property
    def refused(self) -> dict[str, list[str]]:
        """The cases in which a provider of amp_ext's, or the baseline, failed or was wrong."""
        wrong: dict[str, list[str]] = {}
        for record in self.measured:
            if record["error"] and record["provider"] in (*OURS, record["baseline"]):
                wrong.setdefault(record["provider"], []).append(record["case"])
        return wrong

    def against_fp32(self, provider: str) -> Ratios | None:
        """The time of torch in FP32 over a provider's, both at p20, of the cases with a ratio."""
        times = {
            (record["case"], record["provider"]): record["p20_us"]
            for record in self.measured
            if not record["error"]
        }
        cases = {
            case: times[case, FP32_LINE] / times[case, provider]
            for case in self.ratios[provider].cases
            if (case, FP32_LINE) in times
        }
        return Ratios(cases) if cases else None

    def baselines(self, provider: str) -> list[str]:
        """What a provider's counted ratios are to."""
        cases = self.ratios[provider].cases
        return sorted({r["baseline"] for r in self.measured if r["case"] in cases})


def source(record: Record) -> str:
    """ "torch 2.13.0+cpu, 2 threads, commit ed65038, 2026-11-22, `python bench/run.py all`"."""
    names = ("torch", "triton", "cuda", "driver")
    parts = [f"{name} {record[name]}" for name in names if record[name]]
    if record["device"] == "cpu":
        parts.append(f"{record['threads']} threads")
    command = re.sub(r" --(?:json|results)[ =]('[^']*'|\S+)", "", record["command"])
    parts += [f"commit {record['commit'] or 'unknown'}", record["utc"][:10], f"`{command}`"]
    return ", ".join(parts)


def newest(results: Path, quick: bool = False) -> dict[str, list[Run]]:
    """The runs of each machine, GPUs first: of each case its newest measurement.

    Args:
        results: a folder of ledgers, or one.
        quick: take measurements with --quick too. Those of amp_ext alone, --ours, never count.
    """
    found = [
        (file.parent.name, record) for file in ledger.files(results) for record in ledger.read(file)
    ]
    found.sort(key=lambda pair: pair[1]["utc"])
    skipped = {"--ours"} if quick else {"--ours", "--quick"}
    cases: dict[tuple[str, str, str], list[Record]] = {}
    for (*key, command), lines in groupby(found, lambda pair: _key(*pair)):
        if not skipped & set(command.split()):
            cases.pop(tuple(key), None)
            cases[tuple(key)] = [record for _, record in lines]
    runs: dict[tuple[str, str], list[Record]] = {}
    for (machine, op, _), records in cases.items():
        runs.setdefault((machine, op), []).extend(records)
    machines: dict[str, list[Run]] = {}
    made = [Run(*key, tuple(runs[key])) for key in sorted(runs)]
    for run in sorted(made, key=lambda run: (not run.on_gpu, run.machine)):
        machines.setdefault(run.machine, []).append(run)
    return machines


def _key(machine: str, record: Record) -> tuple[str, str, str, str]:
    """Machine, op, case and command: the lines of one measurement follow each other."""
    case = f"limit {record['dtype']}" if record["limit"] else record["case"]
    return machine, record["op"], case, record["command"]


def ratio_text(ratio: float) -> str:
    """0.23, 1.05, 28.6, 154: three digits, of small ones two."""
    if ratio < 10:
        return f"{ratio:.2f}"
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"
