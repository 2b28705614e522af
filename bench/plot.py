"""Draw ledgers, and write the results in docs/measuring.md.

    python bench/plot.py [--results DIR] [--out DIR]
    python bench/plot.py --page

The first draws each machine (a folder of DIR) by the newest measurement of each case, and names the
figures that lack lines. The second is `make figures`. It writes the results between two comments of
the page, and each figure of the first machine that has its op, from the committed ledgers alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import page
from harness.ledger import FP32_LINE, OURS, Record
from harness.page import Run
from harness.table import three_digits

INK, PALE = "#222222", "#777777"
STYLE = {
    "font.size": 9,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.edgecolor": PALE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
    "legend.frameon": False,
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
    "cublaslt": "#e69f00",
    "fp32": "#777777",
}
MARKERS = {"torch": "s", "cublaslt": "^", "triton": "P"}
NAMES = {
    "cpu": "amp_ext (CPU)",
    "cuda": "amp_ext (CUDA)",
    "triton": "amp_ext (Triton)",
    "library": "amp_ext (library)",
    "cublaslt": "cuBLASLt",
    "fp32": "torch, FP32",
}
FACES = {"fp16": "full", "bf16": "none", "fp32": "left"}  # how a marker is filled
DASHES = {"fp16": "-", "bf16": "--", "fp32": ":"}


class Missing(Exception):
    """Name the lines that a figure needs and the ledgers lack."""


def applied() -> AbstractContextManager[None]:
    """Replace all other settings while a figure is drawn and saved."""
    return matplotlib.style.context(STYLE, after_reset=True)


def canvas(width: float, height: float, title: str, footer: Sequence[str]) -> Figure:
    """Make a figure in inches with a title and a footer."""
    figure = Figure(figsize=(width, height))
    figure.suptitle(title)
    lines = [part for line in footer for part in textwrap.wrap(line, int(width * 16))]
    options = {"x": 0.01, "ha": "left", "fontsize": 7.5, "color": PALE}
    figure.supxlabel("\n".join(lines), **options)
    return figure


def drawing(width: float, height: float, title: str, runs: Sequence[Run]) -> Figure:
    """Make a figure with the machine in its title and the sources in its footer."""
    sources = dict.fromkeys(source for run in runs for source in run.sources)
    machine = runs[0].device_name
    return canvas(width, height, f"{title} on {machine}", [machine, *sources])


def right_lines(runs: Sequence[Run], op: str) -> list[Record]:
    """Return the op's lines with a time and without an error, or raise Missing."""
    lines = [record for run in runs if run.op == op for record in run.measured]
    right = [record for record in lines if record["p20_us"] and not record["error"]]
    if not right:
        raise Missing(f"the ledger has no right result of {op}")
    return right


def roofline(runs: Sequence[Run]) -> Figure:
    """Draw matrix products below the copy bandwidth and the product rates beside them."""
    points: dict[tuple[str, str], list[Record]] = {}  # by provider and dtype
    roofs: dict[str, float] = {}  # the fastest product that is not amp_ext's, by dtype
    for record in right_lines(runs, "gemm"):
        provider, rate = record["provider"], record["gflop_per_s"]
        dtype = "fp32" if provider == FP32_LINE else record["dtype"]
        if provider not in OURS:
            roofs[dtype] = max(rate, roofs.get(dtype, 0.0))
        if provider != FP32_LINE:
            points.setdefault((provider, dtype), []).append(record)
    copies = [(r, run) for run in runs for r in run.records if "copy" in r["case"]]
    first = [(r["gb_per_s"], run) for r, run in copies if r["gb_per_s"]]
    if not first:
        raise Missing("the ledger has no lines of an op whose first row is a copy")
    slope, copied = max(first, key=lambda pair: pair[0])

    gemm = next(run for run in runs if run.op == "gemm")
    figure = drawing(9.8, 5.2, "Matrix products", [gemm, copied])
    axes = figure.subplots()
    for (provider, dtype), lines in points.items():
        axes.loglog(
            [r["flops"] / r["bytes"] for r in lines],
            [r["gflop_per_s"] for r in lines],
            linestyle="",
            marker=MARKERS.get(provider, "o"),
            color=COLOURS[provider],
            fillstyle=FACES[dtype],
            label=f"{NAMES.get(provider, provider)}, {dtype}",
        )
    corners = [rate / slope for rate in roofs.values()]
    left, right = (end(*axes.get_xlim(), *corners) for end in (min, max))
    for dtype, rate in sorted(roofs.items()):
        label = (
            f"copy: {three_digits(slope)} GB/s,\n{dtype} by others: {three_digits(rate)} GFLOP/s"
        )
        shape = [left, rate / slope, right], [left * slope, rate, rate]
        axes.plot(*shape, DASHES[dtype], color=INK, label=label)
    axes.set(
        xlabel="arithmetic intensity: FLOP per byte of operands and result, each counted once",
        ylabel="GFLOP/s at p20",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    axes.grid()
    figure.legend(loc="outside right upper")
    return figure


def steps(runs: Sequence[Run]) -> Figure:
    """Draw milliseconds of a training step as bars from zero, each case on its own scale."""
    cases: dict[str, list[Record]] = {}
    for record in right_lines(runs, "train"):
        cases.setdefault(record["case"], []).append(record)
    heights = [len(lines) + 1 for lines in cases.values()]
    train = [run for run in runs if run.op == "train"]
    figure = drawing(8.6, 1.0 + 0.5 * len(cases) + 0.3 * sum(heights), "A training step", train)
    grid = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)
    for axes, (case, lines) in zip(grid[:, 0], cases.items(), strict=True):
        for place, record in enumerate(lines):
            p20, p50, p80 = (record[key] / 1e3 for key in ("p20_us", "p50_us", "p80_us"))
            axes.barh(place, p50, height=0.7, color=COLOURS[record["provider"]])
            axes.plot([p20, p80], 2 * [place], color=INK, linewidth=1.2)
            options = {"va": "center", "textcoords": "offset points"}
            axes.annotate(f"{three_digits(p50)} ms", (p80, place), (5, 0), **options)
        names = [NAMES.get(record["provider"], record["provider"]) for record in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.set_xlim(0, 1.15 * max(record["p80_us"] for record in lines) / 1e3)
        axes.set_title(case, loc="left")
        axes.invert_yaxis()
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
    for path in folder.glob("*.svg"):
        path.unlink()
    for kind, file, runs in page.figures(page.RESULTS):
        write(kind, runs, folder / file)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, default=page.RESULTS, help="ledgers: a folder or a file")
    add("--out", type=Path, default=page.ROOT / "build/plots")
    add("--page", action="store_true", help="write docs/measuring.md and its figures")
    options = parser.parse_args(argv)
    if options.page:
        write_page()
        return 0
    if not options.results.exists():
        print(f"plot: nothing drawn, no ledger at {options.results}", file=sys.stderr)
        return 1
    machines = page.newest(options.results, quick=True)
    if not machines:
        print(f"plot: nothing drawn, no whole run of an op in {options.results}", file=sys.stderr)
        return 1
    for machine, runs in machines.items():
        for kind in FIGURES:
            path = options.out / f"{machine}.{kind}.png"
            try:
                write(kind, runs, path)
                print(path)
            except Missing as missing:
                print(f"{machine}: no {kind}, {missing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
