"""Draw ledgers, and write the results in docs/measuring.md.

    python bench/plot.py [--results DIR] [--out DIR] [--formats png svg]
    python bench/plot.py --page

The first draws each machine (a folder of DIR) by the newest measurement of each case, and names the
figures that lack lines. The second is `make figures`. It writes the results between two comments of
the page, and the figures of the first machine, from the committed ledgers alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import evidence, page
from harness.evidence import Run
from harness.ledger import FP32_LINE, OURS, Record

INK, PALE = "#222222", "#777777"
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the first comes with matplotlib
    "font.size": 9,
    "text.color": INK,
    "figure.facecolor": "white",
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "axes.titlesize": 10,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.facecolor": "white",
    "savefig.dpi": 120,
    "svg.fonttype": "none",  # words as words, a tenth of the size
    "svg.hashsalt": "amp_ext",  # the same names of its parts every time
}
# Colour-blind safe (Okabe and Ito); amp_ext's own in blues and greens.
COLOURS = {
    **dict.fromkeys(("amp_ext", "cpu", "cuda"), "#0072b2"),
    "triton": "#009e73",
    "library": "#56b4e9",
    "torch": "#d55e00",
    "compile": "#cc79a7",
    "cublaslt": "#e69f00",
    "fp32": "#777777",
}
MARKERS = {"torch": "s", "compile": "D", "cublaslt": "^", "fp32": "x", "triton": "P"}
NAMES = {
    "cpu": "amp_ext (CPU)",
    "cuda": "amp_ext (CUDA)",
    "triton": "amp_ext (Triton)",
    "library": "amp_ext (library)",
    "compile": "torch.compile",
    "cublaslt": "cuBLASLt",
    "fp32": "torch, FP32",
}
FACES = {"fp16": "full", "bf16": "none", "fp32": "left"}  # how a marker is filled
DASHES = {"fp16": "-", "bf16": "--", "fp32": ":"}
SLOPE = 2.4  # the width of its line
DECADES = 30  # at least, so that an axis has two numbers


class Missing(Exception):
    """Name the lines that a figure needs and the ledgers lack."""


# ---- style -------------------------------------------------------------------------------------


def applied() -> AbstractContextManager[None]:
    """Replace all other settings while a figure is drawn and saved."""
    return matplotlib.style.context(STYLE, after_reset=True)


def look(provider: str, **more: object) -> dict[str, object]:
    """Return matplotlib's options for a provider's points."""
    colour = COLOURS.get(provider, "#4b0082")
    marker = MARKERS.get(provider, "o")
    return {"marker": marker, "linestyle": "", "markersize": 6, "color": colour, **more}


def number(value: float) -> str:
    """Write three digits, and all digits before the point: 0.0123, 1.20, 57.4, 2,955."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def canvas(width: float, height: float, title: str, footer: Sequence[str]) -> Figure:
    """Make a figure in inches with a title, and room for the footer below."""
    lines = [part for line in footer for part in textwrap.wrap(line, int(width * 16))]
    below = 0.13 * len(lines) + 0.08
    height += below
    layout = ConstrainedLayoutEngine(rect=(0, below / height, 1, 1 - below / height))
    figure = Figure(figsize=(width, height), layout=layout)
    figure.suptitle(title)
    options = {"fontsize": 7.5, "color": PALE, "va": "bottom", "linespacing": 1.25}
    figure.text(0.1 / width, 0.06 / height, "\n".join(lines), **options)
    return figure


# ---- figures -----------------------------------------------------------------------------------


def cases_of(runs: Sequence[Run], op: str, unit: str) -> dict[str, list[Record]]:
    """Return the op's right results that have a unit (a ledger's key), by case."""
    cases: dict[str, list[Record]] = {}
    for record in (record for run in runs if run.op == op for record in run.measured):
        if record[unit] and not record["error"]:
            cases.setdefault(record["case"], []).append(record)
    if not cases:
        raise Missing(f"the ledger has no right result of {op}")
    return cases


def drawing(width: float, height: float, title: str, runs: Sequence[Run]) -> Figure:
    """Make a figure with the machine in its title and the sources in its footer."""
    sources = dict.fromkeys(source for run in runs for source in run.sources)
    machine = runs[0].device_name
    return canvas(width, height, f"{title} on {machine}", [machine, *sources])


def roofline(runs: Sequence[Run]) -> Figure:
    """Draw matrix products below the copy bandwidth and the product rates beside them."""
    cases = cases_of(runs, "gemm", "gflop_per_s")
    points = [r for lines in cases.values() for r in lines if r["provider"] != FP32_LINE]
    first = [(r, run) for run in runs for r in run.records if r["limit"]]
    limits = [pair for pair in first if "copy" in pair[0]["case"] and pair[0]["gb_per_s"]]
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

    figure = drawing(9.8, 4.8, "Matrix products", [gemm, copied])
    axes = figure.subplots()
    axes.plot([left, top / slope], [left * slope, top], color=INK, linewidth=SLOPE)
    for dtype, rate in roofs.items():
        axes.plot([rate / slope, right], 2 * [rate], DASHES[dtype], color=INK)
    for r in points:
        options = look(r["provider"], fillstyle=FACES[r["dtype"]])
        axes.plot(r["flops"] / r["bytes"], r["gflop_per_s"], **options)
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
    providers = dict.fromkeys(r["provider"] for r in points)
    handles = [legend(label=NAMES.get(name, name), **look(name)) for name in providers]
    handles += [
        legend(label=f"{dtype} operands", **look("", color=PALE, fillstyle=face))
        for dtype, face in FACES.items()
        if dtype in {r["dtype"] for r in points}
    ]
    copies = f"{copy['case']}: {number(slope)} GB/s"
    handles.append(legend(label=copies, color=INK, linewidth=SLOPE))
    for dtype, rate in roofs.items():
        words = f"fastest {dtype} product\nby others: {number(rate)} GFLOP/s"
        handles.append(legend(label=words, color=INK, linestyle=DASHES[dtype]))
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def fastest_of_others(gemm: Run) -> dict[str, float]:
    """Return the fastest rate of a product that is not amp_ext's, by dtype, the fastest first."""
    rates: dict[str, float] = {}
    for record in gemm.records:
        rate = record["gflop_per_s"]
        if record["provider"] not in OURS and rate and not record["error"]:
            dtype = "fp32" if record["provider"] == FP32_LINE else record["dtype"]
            rates[dtype] = max(rate, rates.get(dtype, 0.0))
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def steps(runs: Sequence[Run]) -> Figure:
    """Draw milliseconds of a training step as bars from zero, each case on its own scale."""
    cases = cases_of(runs, "train", "p20_us")
    heights = [len(lines) for lines in cases.values()]
    train = [run for run in runs if run.op == "train"]
    figure = drawing(8.6, 0.7 + 0.75 * len(cases) + 0.3 * sum(heights), "A training step", train)
    grid = figure.subplots(len(cases), 1, squeeze=False, height_ratios=[h + 1 for h in heights])
    for axes, (case, lines) in zip(grid[:, 0], cases.items(), strict=True):
        for place, record in enumerate(lines):
            p20, p50, p80 = (record[key] / 1e3 for key in ("p20_us", "p50_us", "p80_us"))
            axes.barh(place, p50, height=0.7, color=look(record["provider"])["color"])
            axes.plot([p20, p80], 2 * [place], color=INK, linewidth=1.2)
            options = {"va": "center", "textcoords": "offset points", "fontsize": 8.5}
            axes.annotate(f"{number(p50)} ms", (p80, place), (5, 0), **options)
        names = [NAMES.get(record["provider"], record["provider"]) for record in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.set_xlim(0, 1.15 * max(record["p80_us"] for record in lines) / 1e3)
        axes.set_title(case, loc="left")
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,g} ms")
        axes.grid(axis="x")
    words = "a step's time: bars to the median, black from the 20th to the 80th percentile"
    grid[-1][0].set_xlabel(words)
    return figure


FIGURES: dict[str, Callable[[Sequence[Run]], Figure]] = {"steps": steps, "roofline": roofline}


def digest(runs: Sequence[Run]) -> str:
    """Return a hash of the runs' lines."""
    return hashlib.sha256(json.dumps([run.records for run in runs]).encode()).hexdigest()


def write(kind: str, runs: Sequence[Run], path: Path) -> None:
    """Draw a figure into a PNG or SVG file, with the digest of the runs in its metadata.

    The same figure is the same file: SVG gets no date. Raises Missing.
    """
    words = f"data {digest(runs)}"
    metadata = {".png": {"Comment": words}, ".svg": {"Description": words, "Date": None}}
    with applied():
        figure = FIGURES[kind](runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata[path.suffix])


def write_page() -> None:
    """Write the results on the page and their figures; remove all other figures."""
    page.PAGE.write_text(page.replaced(page.PAGE.read_text(), page.section(page.RESULTS)))
    folder = page.ROOT / page.PLOTS
    leftover = set(folder.glob("*.svg"))
    for kind, file, runs in page.figures(page.RESULTS):
        write(kind, runs, folder / file)
        leftover.discard(folder / file)
    for path in leftover:
        path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, default=page.RESULTS, help="ledgers: a folder or a file")
    add("--out", type=Path, default=page.ROOT / "build/plots")
    add("--formats", nargs="+", choices=("png", "svg"), default=("png", "svg"))
    add("--page", action="store_true", help="write docs/measuring.md and its figures")
    options = parser.parse_args(argv)
    if options.page:
        write_page()
        return 0
    if not options.results.exists():
        print(f"plot: nothing drawn, no ledger at {options.results}", file=sys.stderr)
        return 1
    for machine, runs in evidence.newest(options.results, quick=True).items():
        for kind in FIGURES:
            for suffix in options.formats:
                path = options.out / f"{machine}.{kind}.{suffix}"
                try:
                    write(kind, runs, path)
                except Missing as missing:
                    print(f"{machine}: no {kind}, {missing}")
                    break
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
