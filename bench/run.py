"""Time amp_ext against torch, interleaved in one run, with a check of every result.

    python bench/run.py unscale --device cpu
    python bench/run.py scaler --device cpu --quick --json scaler.jsonl

A case whose result is not torch's gets no ratio, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

import timing
from registry import OPS, OURS, Case, Op, Trial, load

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

WIDTH = 100
ROW = "{:<40}{:<9}{:>11}{:>11}{:>11}{:>10}{:>8}"


@dataclass
class Outcome:
    """A measured case; `error` is why it has no ratio."""

    case: Case
    trial: Trial | None = None
    times: dict[str, timing.Quantiles] = field(default_factory=dict)
    foreign_cores: float | None = None
    error: str | None = None

    def ratio(self, provider: str) -> float | None:
        """The baseline's time over the provider's at p20; above 1 the provider is faster."""
        baseline = self.case.baseline
        if self.error or provider == baseline or baseline not in self.times:
            return None
        return self.times[baseline].p20 / self.times[provider].p20

    def rate(self, provider: str, unit: str) -> float:
        """At p20: 1e9 bytes or operations a second, us a parameter or call, or ms a launch."""
        p20, trial = self.times[provider].p20, self.trial
        match unit:
            case "GB/s":
                return trial.bytes / p20 / 1e3
            case "GFLOP/s":
                return trial.flops / p20 / 1e3
            case "us/param":
                return p20 / trial.parameters
            case "us/call":
                return p20 / trial.calls
        return p20 / 1e3


def measure(case: Case, op: Op, device: torch.device, quick: bool) -> Outcome:
    outcome = Outcome(case)
    events = device.type == "cuda" and not op.host
    budget = (timing.QUICK if quick else timing.FULL)[device.type]
    try:
        outcome.trial = case.build()
        if device.type == "cpu":
            outcome.foreign_cores = timing.foreign_load(wait=0.1 if quick else 5.0)
        outcome.times = timing.interleaved(outcome.trial.providers, budget, events)
        outcome.trial.verify()
    except Exception as error:  # one case's failure must leave the others their results
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def table_lines(outcome: Outcome, unit: str) -> Iterator[str]:
    name = outcome.case.name
    for provider, time in outcome.times.items():
        ratio, rate = outcome.ratio(provider), outcome.rate(provider, unit)
        yield ROW.format(
            name,
            provider,
            *(f"{us:,.{2 if us < 1e5 else 0}f}" for us in (time.p20, time.p50, time.p80)),
            f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}",
            f"{ratio:.2f}" if ratio else "",
        ).rstrip()
        name = ""
    if outcome.error:
        yield from textwrap.wrap(f"{name} NO RATIO, {outcome.error}".strip(), WIDTH)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def mean_line(outcomes: Sequence[Outcome]) -> str:
    counted = [outcome for outcome in outcomes if outcome.case.counted]
    ratios = [ratio for o in counted if OURS in o.times and (ratio := o.ratio(OURS))]
    mean = f"{geometric_mean(ratios):.2f}" if ratios else "none"
    cases = f"{len(ratios)} of {len(counted)}" if len(ratios) < len(counted) else f"{len(counted)}"
    return ROW.format(f"geometric mean of {cases} ratios", "", "", "", "", "", mean)


def records(outcome: Outcome, op: Op, environment: dict[str, object]) -> Iterator[dict]:
    for provider, time in outcome.times.items():
        yield {
            "op": op.name,
            "case": outcome.case.name,
            "provider": provider,
            **{f"{name}_us": us for name, us in asdict(time).items()},
            "bytes": outcome.trial.bytes or None,
            "gb_per_s": outcome.rate(provider, "GB/s") if outcome.trial.bytes else None,
            "flops": outcome.trial.flops or None,
            "gflop_per_s": outcome.rate(provider, "GFLOP/s") if outcome.trial.flops else None,
            "parameters": outcome.trial.parameters or None,
            "calls": outcome.trial.calls,
            "ratio": outcome.ratio(provider),
            "counted": outcome.case.counted,
            "error": outcome.error,
            "foreign_cores": outcome.foreign_cores,
            **environment,
            "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def describe_environment(device: torch.device) -> dict[str, object]:
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit of this file's repository, "-dirty" with local changes; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--quick", action="store_true", help="small inputs, few repeats: seconds")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases named like this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a measurement")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    options.device = torch.device(options.device)
    return options


def print_heading(op: Op, environment: dict[str, object]) -> None:
    where = "{device}: {device_name}, {threads} threads, torch {torch}, commit {commit}"
    ratio = "Ratio: torch's p20 over this line's; above 1 it is faster than torch."
    for paragraph in (f"{op.name} on {where.format(**environment)}", *op.notes, ratio):
        print(textwrap.fill(paragraph, WIDTH))
    print(ROW.format("case", "", "p20 us", "p50 us", "p80 us", op.rate, "ratio"), flush=True)


def progress(cases: Sequence[Case]) -> Iterator[Case]:
    if tqdm is None:
        for case in cases:
            print(case.name, file=sys.stderr)
            yield case
        return
    with tqdm(cases, unit="case", leave=False, file=sys.stderr) as bar:
        for case in bar:
            bar.set_description(case.name)
            yield case


def print_lines(lines: Iterable[str]) -> None:
    """To stdout at once, above a progress bar on the same terminal."""
    for line in lines:
        tqdm.write(line) if tqdm else print(line)
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    op = load(options.op)
    cases = [c for c in op.cases(options.device, options.quick) if options.filter in c.name]
    if not cases:
        print(f"no case of {op.name} has {options.filter!r} in its name", file=sys.stderr)
        return 2
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(options.device)
    print_heading(op, environment)
    outcomes = []
    for case in progress([op.limit(options.device, options.quick), *cases]):
        outcome = measure(case, op, options.device, options.quick)
        print_lines(table_lines(outcome, op.rate))
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps(r) + "\n" for r in records(outcome, op, environment))
        outcome.trial = None
        gc.collect()
        outcomes.append(outcome)
    print(mean_line(outcomes[1:]))
    foreign = max(outcome.foreign_cores or 0.0 for outcome in outcomes)
    if foreign > timing.FOREIGN_CORES:
        print(f"note: other processes held up to {foreign:.1f} cores; repeat on a quiet machine")
    return int(any(outcome.error for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
