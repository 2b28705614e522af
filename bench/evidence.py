"""What the ledgers in a folder say: which lines count, where they come from, and their ratios."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

import ledger
from ledger import FP32_LINE, OURS


@dataclass(frozen=True)
class Run:
    """One op's lines on one machine, of each case those that count.

    Args:
        machine: the folder of the ledgers.
        op: as on run.py's command line.
        records: in the ledgers' order.
    """

    machine: str
    op: str
    records: tuple[dict, ...]

    @property
    def device(self) -> str:
        return self.records[-1]["device"]

    @property
    def device_name(self) -> str:
        return self.records[-1]["device_name"]

    @property
    def measured(self) -> tuple[dict, ...]:
        return tuple(record for record in self.records if not record["limit"])

    @property
    def limits(self) -> tuple[dict, ...]:
        return tuple(record for record in self.records if record["limit"])

    @property
    def sources(self) -> list[Source]:
        """Where its lines come from, each once."""
        return list(dict.fromkeys(Source.of(record) for record in self.records))

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
class Source:
    """Versions, date and command of lines."""

    versions: str
    date: str
    command: str

    @classmethod
    def of(cls, record: dict) -> Source:
        return cls(versions(record), record["utc"][:10], command(record))

    def __str__(self) -> str:
        return f"{self.versions}, {self.date}: {self.command}"


def versions(record: dict) -> str:
    """ "torch 2.13.0+cpu, 2 threads, commit ed65038"."""
    names = ("torch", "triton", "cuda", "driver")
    parts = [f"{name} {record[name]}" for name in names if record[name]]
    if record["device"] == "cpu":
        parts.append(f"{record['threads']} threads")
    return ", ".join([*parts, f"commit {record['commit'] or 'unknown'}"])


def command(record: dict) -> str:
    """What wrote a line, but for where it was written to."""
    return re.sub(r" --(?:json|results)[ =]('[^']*'|\S+)", "", record["command"])


# ---- which lines count ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The lines of one case of one run: all providers that were timed in turn."""

    machine: str
    records: tuple[dict, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        first = self.records[0]
        case = f"limit {first['dtype']}" if first["limit"] else first["case"]
        return self.machine, first["op"], case

    @property
    def quick(self) -> bool:
        return self._has("--quick")

    @property
    def of_ours_alone(self) -> bool:
        return self._has("--ours")

    @property
    def of_a_whole_table(self) -> bool:
        """Whether it is of a run that times all cases, for as long as they ask for."""
        return not any(map(self._has, ("--quick", "--ours", "--filter", "--dtype", "--seconds")))

    @property
    def utc(self) -> str:
        return str(self.records[-1]["utc"])

    def _has(self, option: str) -> bool:
        return option in self.records[0]["command"].split()


def measurements(file: Path) -> Iterator[Measurement]:
    """Of a ledger, in its order: lines of one case that follow each other, no provider twice."""
    for _, lines in groupby(ledger.read(file), lambda r: (r["op"], r["case"], r["command"])):
        group: dict[str, dict] = {}
        for record in lines:
            if record["provider"] in group:
                yield Measurement(file.parent.name, tuple(group.values()))
                group = {}
            group[record["provider"]] = record
        yield Measurement(file.parent.name, tuple(group.values()))


def newest(results: Path, quick: bool = False) -> list[Run]:
    """The runs of all machines: of each case its newest measurement.

    What is older than the newest whole table of a machine and op is left out: of cases that are not
    in it any more. A measurement of amp_ext alone is left out. One with --quick says little; it is
    left out too, or with `quick` taken where the case has no other.
    """
    found = [
        measurement
        for file in ledger.files(results)
        for measurement in measurements(file)
        if not measurement.of_ours_alone and (quick or not measurement.quick)
    ]
    tables: dict[tuple[str, str], str] = {}  # when the newest whole one begins
    for measurement in sorted(found, key=lambda measurement: measurement.utc):
        first = measurement.records[0]
        if measurement.of_a_whole_table and first["limit"]:
            tables[measurement.key[:2]] = measurement.utc
    found = [m for m in found if m.utc >= tables.get(m.key[:2], "")]
    found.sort(key=lambda measurement: (not measurement.quick, measurement.utc))
    chosen = {measurement.key: measurement for measurement in found}
    runs: dict[tuple[str, str], list[dict]] = {}
    for measurement in sorted(chosen.values(), key=lambda measurement: measurement.utc):
        machine, op, _ = measurement.key
        runs.setdefault((machine, op), []).extend(measurement.records)
    return [Run(*key, tuple(runs[key])) for key in sorted(runs)]


def machines(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each machine, of GPUs first."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.device != "cuda", run.machine)):
        found.setdefault(run.machine, []).append(run)
    return found


def footer(runs: Sequence[Run]) -> list[str]:
    """The lines below a figure: machine, then versions, date and command of every source."""
    sources = dict.fromkeys(str(source) for run in runs for source in run.sources)
    return [runs[0].device_name, *sources]


def ratio_text(ratio: float) -> str:
    """0.23, 1.05, 28.6, 154: three digits, of small ones two."""
    if ratio < 10:
        return f"{ratio:.2f}"
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"
