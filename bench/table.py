"""Tables in 100 columns: a first row of limits, cases, and geometric means last."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean
from typing import TypeVar

import ledger
from measure import Outcome
from registry import Op

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

WIDTH = 100
NAME = 39
ROW = "{:<40}{:<11}{:>10}{:>10}{:>10}{:>10}{:>9}"
T = TypeVar("T")


def heading(op: Op, environment: dict[str, object], baselines: Sequence[str]) -> Iterator[str]:
    where = "{device}: {device_name}, {threads} threads, torch {torch}, commit {commit}"
    names = " or ".join(baselines)
    ratio = f"Ratio: the p20 of {names} over this line's; above 1 this line is faster."
    for paragraph in (f"{op.name} on {where.format(**environment)}", *op.notes, ratio):
        yield textwrap.fill(paragraph, WIDTH)
    yield ROW.format("case", "", "p20 us", "p50 us", "p80 us", op.rate, "ratio")


def rows(outcome: Outcome, unit: str) -> Iterator[str]:
    """A line for each provider that ran, and one for each that has no ratio, with the reason."""
    name = outcome.case.label
    if len(name) > NAME:
        yield name
        name = ""
    for provider, time in outcome.times.items():
        ratio, rate = outcome.ratio(provider), outcome.work.rate(unit, time.p20)
        yield ROW.format(
            name,
            provider,
            *(microseconds(us) for us in (time.p20, time.p50, time.p80)),
            f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}",
            f"{ratio:.2f}" if ratio else "",
        ).rstrip()
        name = ""
    for provider, error in outcome.errors.items():
        words = f"{name:<40}{provider:<11}NO RATIO, {error.partition(chr(10))[0]}"
        yield from textwrap.wrap(words, WIDTH, drop_whitespace=False, subsequent_indent=" " * 51)
        name = ""


def microseconds(us: float) -> str:
    return f"{us:,.{2 if us < 1e4 else 0}f}"


def mean_rows(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The geometric mean of the ratios of each line of amp_ext's, over the cases that count."""
    counted = [outcome for outcome in outcomes if outcome.case.counted]
    names = dict.fromkeys(name for o in counted for name in o.times if name in ledger.OURS)
    for name in names or [""]:
        ratios = [ratio for o in counted if name in o.times and (ratio := o.ratio(name))]
        mean = f"{geometric_mean(ratios):.2f}" if ratios else "none"
        of = f"{len(ratios)} of " if len(ratios) < len(counted) else ""
        words = f"geometric mean of {of}{len(counted)} ratios"
        yield ROW.format(words, name, "", "", "", "", mean)


def progress(items: Sequence[T], name: str) -> Iterator[T]:
    """The items, each of which has a name, with a bar on stderr where that is a terminal."""
    if tqdm is None or not sys.stderr.isatty():
        for item in items:
            print(f"{name}: {item.name}", file=sys.stderr)
            yield item
        return
    with tqdm(items, desc=name, unit="case", leave=False, file=sys.stderr) as bar:
        for item in bar:
            bar.set_description(f"{name}: {item.name}")
            yield item


def show(lines: Iterable[str]) -> None:
    """To stdout at once, above a progress bar on the same terminal."""
    for line in lines:
        tqdm.write(line) if tqdm else print(line)
    sys.stdout.flush()
