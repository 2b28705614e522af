"""Draw what figures.py has collected."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

import style
from figures import Figure
from ledger import OURS
from style import number, size

FACES = {"fp16": "full", "bf16": "none", "fp32": "left"}  # how a marker is filled
DASHES = {"fp16": "-", "bf16": "--", "fp32": ":"}
SLOPE = 2.4  # the width of its line
DECADES = 30  # at least, so that an axis has two numbers
WIDE = 20  # largest over smallest rate from which an axis is logarithmic

# ---- roofline ----------------------------------------------------------------------------------


def roofline(figure: Figure) -> Canvas:
    data, points = figure.data, figure.data["points"]
    canvas = style.canvas(9.8, 4.8, figure.title, figure.footer)
    axes = canvas.subplots()
    slope = data["bandwidth"]["rate"]
    roofs = sorted(data["roofs"], key=lambda roof: -roof["rate"])
    ridge = roofs[0]["rate"] / slope
    places = [*(point["intensity"] for point in points), ridge]
    right = max(places) * 2
    left = min(min(places) / 2, right / DECADES)
    lowest = min(left * slope, *(point["rate"] for point in points)) / 2
    axes.plot([left, ridge], [left * slope, ridge * slope], color=style.INK, linewidth=SLOPE)
    for roof in roofs:
        place = [roof["rate"] / slope, right]
        axes.plot(place, 2 * [roof["rate"]], DASHES[roof["dtype"]], color=style.INK)
    for point in points:
        look = style.look(point["provider"], fillstyle=FACES[point["dtype"]])
        axes.plot(point["intensity"], point["rate"], **look)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(min(lowest, roofs[0]["rate"] / DECADES), None),
        xlabel="arithmetic intensity: FLOP a byte of operands and result, each counted once",
        ylabel="GFLOP/s at p20",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    axes.grid()
    legend = partial(Line2D, [], [])
    handles = [
        legend(label=style.name(provider), **style.look(provider))
        for provider in dict.fromkeys(point["provider"] for point in points)
    ]
    shown = sorted({point["dtype"] for point in points})
    handles += [
        legend(label=f"{dtype} operands", **style.look("", color=style.PALE, fillstyle=face))
        for dtype, face in FACES.items()
        if dtype in shown
    ]
    copy = f"{data['bandwidth']['name']}: {number(slope)} GB/s"
    handles.append(legend(label=copy, color=style.INK, linewidth=SLOPE))
    for roof in roofs:
        words = f"fastest {roof['dtype']} product\nby others: {number(roof['rate'])} GFLOP/s"
        handles.append(legend(label=words, color=style.INK, linestyle=DASHES[roof["dtype"]]))
    canvas.legend(handles=handles, loc="outside right upper")
    return canvas


# ---- bandwidth ----------------------------------------------------------------------------------


def bandwidth(figure: Figure) -> Canvas:
    panels = figure.data["panels"]
    canvas = style.canvas(10, 0.5 + 2.9 * len(panels), figure.title, figure.footer)
    grid = canvas.subplots(len(panels), 2, width_ratios=(2.2, 1), squeeze=False)
    for (axes, key), panel in zip(grid, panels, strict=True):
        bandwidth_panel(axes, key, panel)
    grid[-1][0].set_xlabel("bytes read and written by one launch (cases of one size side by side)")
    seen = dict.fromkeys(p for panel in panels for case in panel["cases"] for p in case["rates"])
    handles = [Line2D([], [], label=style.name(p), **look(p)) for p in seen]
    grid[0][1].legend(handles=handles, loc="lower left")
    return canvas


def look(provider: str) -> dict[str, object]:
    """amp_ext's points are filled, and show through others' at the same place."""
    return style.look(provider, fillstyle="full" if provider in OURS else "none")


def bandwidth_panel(axes: Axes, key: Axes, panel: dict) -> None:
    """Points on the left, and on the right what the letters stand for."""
    places = side_by_side([case["bytes"] for case in panel["cases"]])
    lines = []
    for letter, place, case in zip(string.ascii_lowercase, places, panel["cases"], strict=False):
        rates = case["rates"]
        axes.plot(
            2 * [place],
            [min(rates.values()), max(rates.values())],
            color=style.GRID,
            linewidth=1,
            zorder=1,
        )
        for provider, rate in rates.items():
            axes.plot(place, rate, **look(provider))
        axes.annotate(
            letter,
            (place, max(rates.values())),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"color": "white", "alpha": 0.7, "pad": 0.5},
        )
        lines.append(f"{letter}  {case['case']}: {size(case['bytes'])}")
    for limit in panel["limits"]:
        axes.axhline(limit["rate"], color=style.INK, linewidth=1, linestyle="--")
        lines.append(f"--  {limit['name']}: {number(limit['rate'])} GB/s")
    axes.set(xscale="log", title=panel["op"], ylabel="GB/s at p20")
    axes.margins(x=0.08, y=0.14)
    shown = [rate for case in panel["cases"] for rate in case["rates"].values()]
    if max(shown) > WIDE * min(shown):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(which="major")
    key.axis("off")
    key.text(
        0, 0.98, "\n".join(lines), transform=key.transAxes, va="top", fontsize=8, linespacing=1.5
    )


def side_by_side(sizes: list[float]) -> list[float]:
    """Places on a logarithmic axis, at least a tenth apart, for sizes in ascending order."""
    places: list[float] = []
    for value in sizes:
        least = places[-1] * 1.3 if places else 0
        places.append(max(value, least))
    return places


# ---- steps --------------------------------------------------------------------------------------


def steps(figure: Figure) -> Canvas:
    """Bars from zero, each case on its own scale: a logarithm would shrink the differences."""
    cases = figure.data["cases"]
    heights = [len(times) for times in cases.values()]
    canvas = style.canvas(
        8.6, 0.7 + 0.75 * len(cases) + 0.3 * sum(heights), figure.title, figure.footer
    )
    grid = canvas.subplots(len(cases), 1, squeeze=False, height_ratios=[h + 1 for h in heights])
    for axes, (case, times) in zip(grid[:, 0], cases.items(), strict=True):
        for place, (provider, (p20, p50, p80)) in enumerate(times.items()):
            axes.barh(place, p50, height=0.7, color=style.colour(provider))
            axes.plot([p20, p80], 2 * [place], color=style.INK, linewidth=1.2)
            axes.annotate(
                f"{number(p50)} ms",
                (p80, place),
                (5, 0),
                va="center",
                textcoords="offset points",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(times)), map(style.name, times))
        axes.set_xlim(0, 1.15 * max(p80 for *_, p80 in times.values()))
        axes.set_title(case, loc="left")
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,g} ms")
        axes.grid(axis="x")
    grid[-1][0].set_xlabel(
        "a step's time: bars to the median, black from the 20th to the 80th percentile"
    )
    return canvas


DRAW: dict[str, Callable[[Figure], Canvas]] = {
    function.__name__: function for function in (roofline, bandwidth, steps)
}


def write(figure: Figure, path: Path) -> None:
    """Draw a figure into a PNG or SVG file, whose metadata has the digest of what it shows.

    SVG gets no date: the same figure is the same file.
    """
    digest = f"data {figure.digest}"
    metadata = {".png": {"Comment": digest}, ".svg": {"Description": digest, "Date": None}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.applied():
        canvas = DRAW[figure.kind](figure)
        canvas.savefig(path, metadata=metadata[path.suffix])
