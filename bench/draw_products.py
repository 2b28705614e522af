"""Figures of matrix products."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

import style
from evidence import ratio_text
from figures import Figure
from style import number

FACES = {"fp16": "full", "bf16": "none", "fp32": "left"}  # how a marker is filled
DASHES = {"fp16": "-", "bf16": "--", "fp32": ":"}
SLOPE = 2.4  # the width of its line
DECADES = 30  # at least, so that an axis has two numbers
RANGE = 2.0  # colours saturate at ratios of 2^2 and 2^-2

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
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="major")
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


# ---- heatmap -----------------------------------------------------------------------------------


def heatmap(figure: Figure) -> Canvas:
    rows, columns, cells = (figure.data[key] for key in ("rows", "columns", "cells"))
    canvas = style.canvas(
        3.6 + 1.15 * len(columns), 1.6 + 0.27 * len(rows), figure.title, figure.footer
    )
    axes = canvas.subplots()
    logs = np.array(
        [
            [math.log2(cell["ratio"]) if cell and cell["ratio"] else math.nan for cell in row]
            for row in cells
        ]
    )
    image = axes.imshow(logs, cmap=style.RATIOS, vmin=-RANGE, vmax=RANGE, aspect="auto")
    usual = max(
        (cell["to"] for row in cells for cell in row if cell),
        key=[cell["to"] for row in cells for cell in row if cell].count,
    )
    others = set()
    for (y, x), log in np.ndenumerate(logs):
        cell = cells[y][x]
        if not cell:
            continue
        text = "refused" if cell["refused"] else ""
        if cell["ratio"]:
            text = ratio_text(cell["ratio"])
            if cell["to"] != usual:
                others.add(cell["to"])
                text += "*"
        colour = "white" if abs(log) > 0.65 * RANGE else style.INK
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour)
    names = [(dtype, style.name(provider)) for dtype, provider in map(str.split, columns)]
    axes.set_xticks(range(len(columns)), map("\n".join, names))
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    note = f"{style.name(usual)}'s time over amp_ext's: above 1 amp_ext is faster"
    if others:
        note += f"\n* the time of {', '.join(map(style.name, sorted(others)))}"
    axes.set_xlabel(note, fontsize=8.5)
    bar = canvas.colorbar(
        image,
        ax=axes,
        shrink=min(1.0, 3 / (0.27 * len(rows))),
        aspect=14,
        ticks=[-2, -1, 0, 1, 2],
        extend="both",
    )
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.outline.set_visible(False)
    return canvas
