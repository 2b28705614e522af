"""Print tables by tabulate, or as tab-separated values without it, and write CSV files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from harness.ledger import BENCH_KEYS, OURS, Record

TIMES = {"p50_us": "median us", "p20_us": "p20 us", "p80_us": "p80 us"}
BENCHES = dict(zip(BENCH_KEYS, ("do_bench us", "cudagraph us"), strict=True))


def show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: names to the left, figures to the right."""
    try:
        from tabulate import tabulate
    except ImportError:
        csv.writer(sys.stdout, "excel-tab", lineterminator="\n").writerows([headers, *rows])
    else:
        names = ("left", "left")
        align = (*names, *["right"] * (len(headers) - len(names)))
        text = tabulate(rows, headers, "simple", disable_numparse=True, colalign=align)
        print("\n".join(line.rstrip() for line in text.splitlines()))
    sys.stdout.flush()


def table(records: Sequence[Record], unit: str) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the rows of an op's records, geometric means last.

    Args:
        records: of all cases, the limit first.
        unit: the op's rate.
    """
    benches = {k: v for k, v in BENCHES.items() if any(record.get(k) for record in records)}
    keys = {**TIMES, **benches}
    headers = ["case", "provider", *keys.values(), unit, "ratio"]
    rows, last = [], None
    for record in records:
        name, last = ("" if record["case"] == last else label(record)), record["case"]
        times = [microseconds(record.get(key)) for key in keys]
        ratio = f"{record['ratio']:.2f}" if record["ratio"] else ""
        ratio = "NO RATIO" if record["error"] else ratio
        rows.append([name, record["provider"], *times, rate(record, unit), ratio])
    rows += ([*row[:2], *["" for _ in keys], "", row[2]] for row in means(records))
    return headers, rows


def label(record: Record) -> str:
    """Return the case's name, marked where its ratio is not counted."""
    if record["limit"]:
        return f"limit: {record['case']}"
    return record["case"] if record["counted"] else f"{record['case']} (not counted)"


def rate(record: Record, unit: str) -> str:
    """Return 1e9 bytes or operations a second, us a parameter or call, or ms, at p20."""
    us = record["p20_us"]
    if us is None:
        return ""
    value = {
        "GB/s": record["gb_per_s"],
        "GFLOP/s": record["gflop_per_s"],
        "us/param": us / (record["parameters"] or 1),
        "us/call": us / record["calls"],
        "ms/step": us / 1e3,
    }[unit]
    return three_digits(value or 0.0)


def three_digits(value: float) -> str:
    """Write three digits, and all digits before the point: 0.0123, 1.20, 57.4, 2,955."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def microseconds(us: float | None) -> str:
    return "" if us is None else f"{us:,.{2 if us < 1e4 else 0}f}"


def means(records: Iterable[Record]) -> list[tuple[str, str, str]]:
    """Return the geometric mean of each of amp_ext's providers over the counted cases."""
    counted = [record for record in records if record["counted"] and not record["limit"]]
    cases = len({record["case"] for record in counted})
    rows = []
    for name in dict.fromkeys(r["provider"] for r in counted if r["provider"] in OURS):
        ratios = [r["ratio"] for r in counted if r["provider"] == name and r["ratio"]]
        of = f"{len(ratios)} of " if len(ratios) < cases else ""
        mean = f"{geometric_mean(ratios):.2f}" if ratios else "none"
        rows.append((f"geometric mean of {of}{cases} ratios", name, mean))
    return rows


def ratio_text(ratio: float) -> str:
    """Return 0.23, 1.05, 28.6, 154: three digits, of small ones two."""
    if ratio < 10:
        return f"{ratio:.2f}"
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def write_csv(path: Path, records: Sequence[Record]) -> None:
    """Write the records to a file, a column a key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        keys = dict.fromkeys(key for record in records for key in record)
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(records)
