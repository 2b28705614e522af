"""One run of everything that wants a GPU, with the torch at hand and without downloads.

    python bench/gpu.py [RESULTS]
    python bench/gpu.py --dry-run [RESULTS]

Builds amp_ext for the GPU that is present, runs the tests, the probe of what tests/simt assumes of
it, the small cases under compute-sanitizer where that is installed, and the benchmarks, which
append to RESULTS/<gpu>/<utc date>-<commit>.jsonl; figures are drawn beside that. A stage that
fails, or whose program is missing, leaves the others running. The summary, of the ledger's name
with .summary.txt, is written as it goes; its table of ratios comes last. The exit status is 1 when
a stage has failed. --dry-run rehearses all that with the CPU in the GPU's place.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import evidence
from evidence import ratio_text
from stages import ROOT, Summary, run_all
from targets import Gpu, Rehearsal

ROW = "{:<10}{:<10}{:>6}{:>8}{:>8}{:>8}"


def ledger_of(results: Path, machine: str) -> Path:
    """The file for this run's measurements."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    folder = re.sub(r"\W+", "-", machine).strip("-").lower()
    return results / folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{commit}.jsonl"


def table(ledger: Path) -> str:
    """The geometric mean, the worst and the best ratio of each op and line."""
    if not ledger.exists():
        return "nothing was measured"
    try:
        runs = evidence.newest(ledger, quick=True)
    except ValueError as error:  # its last line was cut off
        return f"no table: {error}"
    lines = ["ratios, above 1 amp_ext is faster:"]
    lines.append(ROW.format("op", "line", "cases", "mean", "worst", "best"))
    for run in runs:
        for provider, ratios in run.ratios.items():
            values = (ratios.mean, ratios.cases[ratios.worst], ratios.cases[ratios.best])
            texts = map(ratio_text, values)
            lines.append(ROW.format(run.op, provider, len(ratios.cases), *texts))
        refused = {record["case"] for record in run.measured if record["error"]}
        lines += [f"    refused: {case}" for case in sorted(refused)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="the CPU in the GPU's place")
    options = parser.parse_args(argv)
    if options.dry_run:
        results = (options.results or ROOT / "build/rehearsal").resolve()
        ledger = ledger_of(results, "rehearsal")
        target = Rehearsal(ledger, lib=ROOT / "build/rehearsal-lib", device="cpu")
    elif torch.cuda.is_available():
        results = (options.results or ROOT / "bench/results").resolve()
        target = Gpu(ledger_of(results, torch.cuda.get_device_name()))
    else:
        print(f"gpu: torch {torch.__version__} of {sys.executable} sees no GPU", file=sys.stderr)
        return 1
    target.ledger.parent.mkdir(parents=True, exist_ok=True)
    built = " ".join(f"{name}={value}" for name, value in target.build_options().items())
    heading = f"{target.name}, torch {torch.__version__}, built with {built}"
    summary = Summary(target.beside(".summary.txt"), heading)
    try:
        run_all(list(target.stages()), target.environment(), target.budget, summary)
    finally:
        summary.write(table(target.ledger))
    print(f"\n{summary.path.read_text()}", end="")
    return int(summary.failed)


if __name__ == "__main__":
    sys.exit(main())
