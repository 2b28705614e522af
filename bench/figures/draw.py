"""The figures: each function draws the runs of one machine (evidence.newest)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from figures import style
from figures.style import number
from harness.evidence import Run
from harness.ledger import FP32_LINE, OURS, Record

FACES = {"fp16": "full", "bf16": "none", "fp32": "left"}  # how a marker is filled
DASHES = {"fp16": "-", "bf16": "--", "fp32": ":"}
SLOPE = 2.4  # the width of its line
DECADES = 30  # at least, so that an axis has two numbers


class Missing(Exception):
    """The ledgers lack lines that a figure needs."""


def cases_of(runs: Sequence[Run], op: str, unit: str) -> dict[str, list[Record]]:
    """The op's right results that have a figure in a unit (a ledger's key), by case."""
    cases: dict[str, list[Record]] = {}
    for record in (record for run in runs if run.op == op for record in run.measured):
        if record[unit] and not record["error"]:
            cases.setdefault(record["case"], []).append(record)
    if not cases:
        raise Missing(f"the ledger has no right result of {op}")
    return cases


def canvas(width: float, height: float, title: str, runs: Sequence[Run]) -> Figure:
    """A figure with the machine's name, and what was measured by whom below it."""
    sources = dict.fromkeys(source for run in runs for source in run.sources)
    machine = runs[0].device_name
    return style.canvas(width, height, f"{title} on {machine}", [machine, *sources])


# ---- roofline ----------------------------------------------------------------------------------


def roofline(runs: Sequence[Run]) -> Figure:
    """Matrix products below the copy bandwidth and the product rates measured beside them."""
    cases = cases_of(runs, "gemm", "gflop_per_s")
    points = [r for lines in cases.values() for r in lines if r["provider"] != FP32_LINE]
    limits = [(r, run) for run in runs for r in run.limits if r["gb_per_s"] and "copy" in r["case"]]
    if not limits:
        raise Missing("the ledger has no lines of an op whose first row is a copy")
    copy, copied = max(limits, key=lambda pair: pair[0]["gb_per_s"])
    gemm = next(run for run in runs if run.op == "gemm")
    roofs = fastest_of_others(gemm)
    slope, top = copy["gb_per_s"], max(roofs.values())
    places = [*(r["flops"] / r["bytes"] for r in points), top / slope]
    right = max(places) * 2
    left = min(min(places) / 2, right / DECADES)
    lowest = min(left * slope, *(r["gflop_per_s"] for r in points)) / 2

    figure = canvas(9.8, 4.8, "Matrix products", [gemm, copied])
    axes = figure.subplots()
    axes.plot([left, top / slope], [left * slope, top], color=style.INK, linewidth=SLOPE)
    for dtype, rate in roofs.items():
        axes.plot([rate / slope, right], 2 * [rate], DASHES[dtype], color=style.INK)
    for r in points:
        look = style.look(r["provider"], fillstyle=FACES[r["dtype"]])
        axes.plot(r["flops"] / r["bytes"], r["gflop_per_s"], **look)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(min(lowest, top / DECADES), None),
        xlabel="arithmetic intensity: FLOP per byte of operands and result, each counted once",
        ylabel="GFLOP/s at p20",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    axes.grid()
    legend = partial(Line2D, [], [])
    handles = [
        legend(label=style.name(provider), **style.look(provider))
        for provider in dict.fromkeys(r["provider"] for r in points)
    ]
    handles += [
        legend(label=f"{dtype} operands", **style.look("", color=style.PALE, fillstyle=face))
        for dtype, face in FACES.items()
        if dtype in {r["dtype"] for r in points}
    ]
    copies = f"{copy['case']}: {number(slope)} GB/s"
    handles.append(legend(label=copies, color=style.INK, linewidth=SLOPE))
    for dtype, rate in roofs.items():
        words = f"fastest {dtype} product\nby others: {number(rate)} GFLOP/s"
        handles.append(legend(label=words, color=style.INK, linestyle=DASHES[dtype]))
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def fastest_of_others(gemm: Run) -> dict[str, float]:
    """The rate of the fastest product that was not amp_ext's, by dtype, the fastest dtype first."""
    rates: dict[str, float] = {}
    for record in gemm.records:
        rate = record["gflop_per_s"]
        if record["provider"] not in OURS and rate and not record["error"]:
            dtype = "fp32" if record["provider"] == FP32_LINE else record["dtype"]
            rates[dtype] = max(rate, rates.get(dtype, 0.0))
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


# ---- steps --------------------------------------------------------------------------------------


def steps(runs: Sequence[Run]) -> Figure:
    """Milliseconds of a training step: bars from zero, each case on its own scale, because a
    logarithm would shrink the differences."""
    cases = cases_of(runs, "train", "p20_us")
    heights = [len(lines) for lines in cases.values()]
    train = [run for run in runs if run.op == "train"]
    figure = canvas(8.6, 0.7 + 0.75 * len(cases) + 0.3 * sum(heights), "A training step", train)
    grid = figure.subplots(len(cases), 1, squeeze=False, height_ratios=[h + 1 for h in heights])
    for axes, (case, lines) in zip(grid[:, 0], cases.items(), strict=True):
        for place, record in enumerate(lines):
            p20, p50, p80 = (record[key] / 1e3 for key in ("p20_us", "p50_us", "p80_us"))
            axes.barh(place, p50, height=0.7, color=style.colour(record["provider"]))
            axes.plot([p20, p80], 2 * [place], color=style.INK, linewidth=1.2)
            axes.annotate(
                f"{number(p50)} ms",
                (p80, place),
                (5, 0),
                va="center",
                textcoords="offset points",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(lines)), [style.name(record["provider"]) for record in lines])
        axes.set_xlim(0, 1.15 * max(record["p80_us"] for record in lines) / 1e3)
        axes.set_title(case, loc="left")
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,g} ms")
        axes.grid(axis="x")
    grid[-1][0].set_xlabel(
        "a step's time: bars to the median, black from the 20th to the 80th percentile"
    )
    return figure


# ---- files --------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[Sequence[Run]], Figure]] = {
    "steps": steps,
    "roofline": roofline,
}


def digest(runs: Sequence[Run]) -> str:
    """The same for runs of the same lines."""
    return hashlib.sha256(json.dumps([run.records for run in runs]).encode()).hexdigest()


def write(kind: str, runs: Sequence[Run], path: Path) -> None:
    """Draw a figure into a PNG or SVG file, whose metadata has the digest of the runs.

    SVG gets no date: the same figure is the same file. Raises Missing.
    """
    words = f"data {digest(runs)}"
    metadata = {".png": {"Comment": words}, ".svg": {"Description": words, "Date": None}}
    with style.applied():
        figure = FIGURES[kind](runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata[path.suffix])
