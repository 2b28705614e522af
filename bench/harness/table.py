"""Tables in 100 columns: a first row of limits, cases, and geometric means last."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean
from typing import TypeVar

from harness.ledger import OURS, Record
from harness.registry import BASELINE, Op

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


def rows(records: Sequence[Record], unit: str) -> Iterator[str]:
    """A line for each provider that ran, and one for each that has no ratio, with the reason.

    Args:
        records: of one case.
        unit: an Op's `rate`.
    """
    name = label(records[0])
    if len(name) > NAME:
        yield name
        name = ""
    for record in records:
        if record["p20_us"] is None:
            continue
        ratio, per = record["ratio"], rate(record, unit)
        yield ROW.format(
            name,
            record["provider"],
            *(microseconds(record[key]) for key in ("p20_us", "p50_us", "p80_us")),
            f"{per:.3g}" if per < 1000 else f"{per:,.0f}",
            f"{ratio:.2f}" if ratio else "",
        ).rstrip()
        name = ""
    for record in records:
        if record["error"]:
            why = record["error"].partition("\n")[0]
            words = f"{name:<40}{record['provider']:<11}NO RATIO, {why}"
            indent = " " * 51
            yield from textwrap.wrap(words, WIDTH, drop_whitespace=False, subsequent_indent=indent)
            name = ""


def label(record: Record) -> str:
    """The case's name, and what is unusual about its ratios."""
    if record["limit"]:
        return f"limit: {record['case']}"
    if record["counted"]:
        return record["case"]
    baseline = record["baseline"]
    return f"{record['case']} ({'not counted' if baseline == BASELINE else f'to {baseline}'})"


def rate(record: Record, unit: str) -> float:
    """1e9 bytes or operations a second, us a parameter or call, or ms a launch, at p20."""
    us = record["p20_us"]
    return {
        "GB/s": record["gb_per_s"],
        "GFLOP/s": record["gflop_per_s"],
        "us/param": us / (record["parameters"] or 1),
        "us/call": us / record["calls"],
        "ms/step": us / 1e3,
    }[unit] or 0.0


def microseconds(us: float) -> str:
    return f"{us:,.{2 if us < 1e4 else 0}f}"


def mean_rows(records: Iterable[Record]) -> Iterator[str]:
    """The geometric mean of the ratios of each line of amp_ext's, over the cases that count."""
    counted = [record for record in records if record["counted"] and not record["limit"]]
    cases = len({record["case"] for record in counted})
    for name in dict.fromkeys(r["provider"] for r in counted if r["provider"] in OURS) or [""]:
        ratios = [r["ratio"] for r in counted if r["provider"] == name and r["ratio"]]
        mean = f"{geometric_mean(ratios):.2f}" if ratios else "none"
        of = f"{len(ratios)} of " if len(ratios) < cases else ""
        yield ROW.format(f"geometric mean of {of}{cases} ratios", name, "", "", "", "", mean)


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
