"""Select each case's newest measurement from a folder of ledgers, and its ratios."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from harness import ledger
from harness.ledger import FP32_LINE, OURS, Record

# Runs of some providers or sizes never count.
CHOSEN = {"--ours", "--providers", "--m", "--sizes"}


@dataclass(frozen=True)
class Run:
    """Hold the newest lines of one op on one machine.

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
    def sources(self) -> list[str]:
        """Return versions, date and command of the lines, each once."""
        return list(dict.fromkeys(map(source, self.records)))

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """Return amp_ext's ratios of the counted cases, by provider and case."""
        found: dict[str, dict[str, float]] = {}
        for record in self.measured:
            if record["provider"] in OURS and record["ratio"] and record["counted"]:
                found.setdefault(record["provider"], {})[record["case"]] = record["ratio"]
        return found

    @property
    def refused(self) -> dict[str, list[str]]:
        """Return the failed cases of amp_ext's providers and of baselines, by provider."""
        wrong: dict[str, list[str]] = {}
        for record in self.measured:
            if record["error"] and record["provider"] in (*OURS, record["baseline"]):
                wrong.setdefault(record["provider"], []).append(record["case"])
        return wrong

    def against_fp32(self, provider: str) -> dict[str, float]:
        """Return the times of torch in FP32 over a provider's, by case with a ratio."""
        right = [record for record in self.measured if not record["error"]]
        times = {(record["case"], record["provider"]): record["p20_us"] for record in right}
        return {
            case: times[case, FP32_LINE] / times[case, provider]
            for case in self.ratios[provider]
            if (case, FP32_LINE) in times
        }

    def baselines(self, provider: str) -> list[str]:
        """Return the baselines of a provider's counted ratios."""
        cases = self.ratios[provider]
        return sorted({r["baseline"] for r in self.measured if r["case"] in cases})


def source(record: Record) -> str:
    """Return "torch 2.13.0+cpu, 2 threads, commit ed65038, 2026-11-22, `python ...`"."""
    names = ("torch", "triton", "cuda", "driver")
    parts = [f"{name} {record[name]}" for name in names if record[name]]
    if record["device"] == "cpu":
        parts.append(f"{record['threads']} threads")
    command = re.sub(r" --(?:json|csv|results)[ =]('[^']*'|\S+)", "", record["command"])
    parts += [f"commit {record['commit'] or 'unknown'}", record["utc"][:10], f"`{command}`"]
    return ", ".join(parts)


def newest(results: Path, quick: bool = False) -> dict[str, list[Run]]:
    """Return the runs of each machine, GPUs first, with the newest lines of each case.

    Args:
        results: a folder of ledgers, or one.
        quick: take measurements with --quick too.
    """
    found = [
        (file.parent.name, record) for file in ledger.files(results) for record in ledger.read(file)
    ]
    found.sort(key=lambda pair: pair[1]["utc"])
    skipped = CHOSEN if quick else CHOSEN | {"--quick"}
    cases: dict[tuple[str, str, str], list[Record]] = {}
    for (*key, command), lines in groupby(found, lambda pair: _key(*pair)):
        if not skipped & {word.partition("=")[0] for word in command.split()}:
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
    """Return machine, op, case and command: the lines of one measurement follow each other."""
    case = f"limit {record['dtype']}" if record["limit"] else record["case"]
    return machine, record["op"], case, record["command"]
