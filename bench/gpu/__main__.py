"""One run of everything that wants a GPU, with the torch at hand and without downloads.

    python bench/gpu RESULTS
    python bench/gpu --only bench --budget 300 RESULTS
    python bench/gpu --dry-run RESULTS

Builds amp_ext for the GPU that is present, runs the tests ("tests"), then the probe of what
tests/cudasim assumes of it and the small cases under compute-sanitizer where that is installed
("checks"), and the benchmarks ("bench"), which append to RESULTS/<gpu>/<utc date>-<commit>.jsonl.
Beside it, of the same name, are .log, which is all that was said, and .summary.txt, which is
written as it goes; its table of ratios comes last. A stage that fails, or whose program is missing,
leaves the others running. The exit status is 1 when a stage has failed. Where the files are a copy
without their repository, AMP_EXT_COMMIT names the commit. --dry-run rehearses all that on the fake
CUDA runtime, which has to run it: `make gpu DRY_RUN=1`, or python tests/fake_cuda/run.py bench/gpu
--dry-run RESULTS.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.stages import Summary, run_all
from harness import evidence
from harness.evidence import ratio_text

GROUPS = ("tests", "checks", "bench")
BUDGET = 540  # seconds
ROW = "{:<14}{:<10}{:>6}{:>8}{:>8}{:>8}"


def table(ledger: Path) -> str:
    """The geometric mean, the worst and the best ratio of each op and line."""
    if not ledger.exists():
        return "nothing was measured"
    try:
        machines = evidence.newest(ledger, quick=True)
    except ValueError as error:  # its last line was cut off
        return f"no table: {error}"
    lines = ["ratios, above 1 amp_ext is faster:"]
    lines.append(ROW.format("op", "line", "cases", "mean", "worst", "best"))
    for run in (run for runs in machines.values() for run in runs):
        for provider, ratios in run.ratios.items():
            values = (ratios.mean, ratios.cases[ratios.worst], ratios.cases[ratios.best])
            texts = map(ratio_text, values)
            lines.append(ROW.format(run.op, provider, len(ratios.cases), *texts))
        for provider, cases in run.refused.items():
            lines += [f"    {run.op}, {provider}, refused: {case}" for case in cases]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("results", type=Path, help="a folder")
    add("--only", choices=GROUPS, help="after the build")
    add("--budget", type=float, default=BUDGET, metavar="S", help=f"seconds, by default {BUDGET}")
    add("--dry-run", action="store_true", help="on the fake CUDA runtime")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    options = parse(argv)
    import torch  # here, because that takes seconds of the budget

    from gpu import targets

    obstacle = ""
    if options.dry_run != ("FAKE_CUDA_KERNELS" in os.environ):
        obstacle = "--dry-run is for tests/fake_cuda/run.py, which needs it"
    elif not torch.cuda.is_available():
        obstacle = f"torch {torch.__version__} of {sys.executable} sees no GPU"
    if obstacle:
        print(f"gpu: {obstacle}", file=sys.stderr)
        return 1
    target = (targets.Rehearsal if options.dry_run else targets.Gpu).of(options.results)
    built = " ".join(f"{name}={value}" for name, value in target.build_options().items())
    heading = f"{target.name}, torch {torch.__version__}, built with {built}"
    target.ledger.parent.mkdir(parents=True, exist_ok=True)
    summary = Summary(target.ledger.with_suffix(".summary.txt"), heading)
    stages = target.stages([options.only] if options.only else GROUPS)
    end = start + options.budget
    try:
        run_all(stages, target.environment(), end, summary, target.ledger.with_suffix(".log"))
    finally:
        summary.add(table(target.ledger))
    print(f"\n{summary.text}", end="")
    return int(summary.failed)


def stop(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does: no stage is left running, and the table is written."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
