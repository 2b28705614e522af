"""Select the newest measurements of the ledgers, and make the results of docs/measuring.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

from harness import ledger
from harness.ledger import FP32_LINE, OURS, Record
from harness.table import ratio_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/measuring.md"
BEGIN = "<!-- results: written by `make figures`, not by hand -->"
END = "<!-- end of results -->"
PLOTS = "bench/results/plots"
CHOSEN = {"--providers", "--m", "--sizes"}  # runs of a part of an op never count
COLUMNS = ("op", "backend", "ratio to", "cases", "geometric mean", "worst", "best")
FIGURES = {  # the committed figures: the op that each needs, and its words
    "steps": ("train", "milliseconds of a training step in FP16, and of torch in FP32"),
    "roofline": ("gemm", "GFLOP/s of matrix products over their arithmetic intensity"),
}
INTRODUCTION = """\
A ratio is the time of torch over that of amp_ext, both at the 20th percentile and
measured in turn in one run: above 1 amp_ext is faster. A wrong result has no ratio. Each
case is shown as it was last measured. A ratio to torch in FP32 compares 16-bit amp_ext
with torch without mixed precision.
"""


@dataclass(frozen=True)
class Run:
    """Hold the newest lines of one op on one machine, in the order of their dates."""

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
    def refused(self) -> dict[str, int]:
        """Count the failed cases of amp_ext's providers and of baselines."""
        wrong: dict[str, int] = {}
        for record in self.measured:
            provider = record["provider"]
            if record["error"] and provider in (*OURS, record["baseline"]):
                wrong[provider] = wrong.get(provider, 0) + 1
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
    files = ledger.files(results)
    found = [
        (file.resolve().parent.name, *key, list(lines))
        for file in files
        for key, lines in groupby(ledger.read(file), _measurement)
    ]
    found.sort(key=lambda measurement: measurement[-1][-1]["utc"])
    skipped = CHOSEN if quick else CHOSEN | {"--quick"}
    cases: dict[tuple[str, str, str], list[Record]] = {}
    for *case, command, lines in found:
        if not skipped & {word.partition("=")[0] for word in command.split()}:
            cases.pop(tuple(case), None)  # the newest is the last
            cases[tuple(case)] = lines
    machines: dict[str, dict[str, list[Record]]] = {}
    for (machine, op, _), records in cases.items():
        machines.setdefault(machine, {}).setdefault(op, []).extend(records)
    runs = {
        machine: [Run(op, tuple(ops[op])) for op in sorted(ops)]
        for machine, ops in sorted(machines.items())
    }
    return dict(sorted(runs.items(), key=lambda item: not item[1][0].on_gpu))


def _measurement(record: Record) -> tuple[str, str, str]:
    """Return op, case and command: the lines of one measurement follow each other."""
    case = f"limit {record['dtype']}" if record["limit"] else record["case"]
    return record["op"], case, record["command"]


def section(results: Path) -> str:
    """Return the text between the two comments."""
    lines = [INTRODUCTION]
    for runs in newest(results).values():
        lines += [f"### {'GPU' if runs[0].on_gpu else 'CPU'}: {runs[0].device_name}", ""]
        rows = [COLUMNS, ["---"] * len(COLUMNS), *(row for run in runs for row in table(run))]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
        ops: dict[str, list[str]] = {}
        for run in runs:
            for words in run.sources:
                ops.setdefault(words, []).append(run.op)
        lines += [*(f"- {', '.join(names)}: {words}" for words, names in ops.items()), ""]
    for kind, file, _ in figures(results):
        lines.append(f"![{FIGURES[kind][1]}](../{PLOTS}/{file})")
    return "\n".join([*lines, ""])


def table(run: Run) -> Iterator[Sequence[str]]:
    """Yield a row for each of amp_ext's providers, and for a baseline that has failed."""
    for provider in dict.fromkeys([*run.ratios, *run.refused]):
        ratios, refused = run.ratios.get(provider, {}), run.refused.get(provider)
        cases = f"{len(ratios)}, {refused} failed" if refused else str(len(ratios))
        if not ratios:
            yield run.op, provider, "", cases, "", "", ""
            continue
        baselines = sorted({r["baseline"] for r in run.measured if r["case"] in ratios})
        yield run.op, provider, ", ".join(baselines), cases, *summary(ratios)
        if fp32 := run.against_fp32(provider):
            yield run.op, provider, "torch, FP32", str(len(fp32)), *summary(fp32)


def summary(ratios: dict[str, float]) -> tuple[str, str, str]:
    """Return the geometric mean, the worst and the best ratio, with the names of their cases."""
    ends = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    texts = (f"{ratio_text(ratios[case])} ({case})" for case in ends)
    return ratio_text(geometric_mean(ratios.values())), *texts


def figures(results: Path) -> Iterator[tuple[str, str, list[Run]]]:
    """Yield kind, file and runs of each figure, of the first machine that has its op."""
    for kind, (op, _) in FIGURES.items():
        for machine, runs in newest(results).items():
            if any(run.op == op and run.measured for run in runs):
                yield kind, f"{machine}.{kind}.svg", runs
                break


def replaced(text: str, new: str, first: str = BEGIN, last: str = END) -> str:
    """Replace the text between two comments of the page, or raise ValueError without them."""
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {first} or, below it, {last}")
    return f"{before}{first}\n{new}\n{last}{after}"
