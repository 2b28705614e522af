"""How every figure looks: the style sheet, colours, words, title and footer."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

SHEET = matplotlib.rc_params_from_file(
    Path(__file__).with_name("figures.mplstyle"), use_default_template=False
)
INK, PALE = SHEET["text.color"], SHEET["axes.edgecolor"]
FOOTER_SIZE = 7.5  # points
FOOTER_INCHES = 0.13  # a line

# Colour-blind safe (Okabe and Ito); amp_ext's own in blues and greens.
COLOURS = {
    "amp_ext": "#0072b2",
    "cpu": "#0072b2",
    "cuda": "#0072b2",
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


def applied() -> AbstractContextManager[None]:
    """The style sheet in place of all other settings: while a figure is drawn and saved."""
    return matplotlib.style.context(SHEET, after_reset=True)


def colour(provider: str) -> str:
    return COLOURS.get(provider, "#4b0082")


def look(provider: str, **more: object) -> dict[str, object]:
    """How matplotlib draws a provider's points."""
    marker = MARKERS.get(provider, "o")
    return {"marker": marker, "linestyle": "", "markersize": 6, "color": colour(provider), **more}


def name(provider: str) -> str:
    return NAMES.get(provider, provider)


def number(value: float) -> str:
    """Three digits, and all of those before the point: 0.0123, 1.20, 57.4, 2,955."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def canvas(width: float, height: float, title: str, footer: Sequence[str]) -> Figure:
    """A figure in inches with a title, and room for the footer below what will be drawn."""
    lines = [part for line in footer for part in textwrap.wrap(line, int(width * 16))]
    below = FOOTER_INCHES * len(lines) + 0.08
    height += below
    layout = ConstrainedLayoutEngine(rect=(0, below / height, 1, 1 - below / height))
    figure = Figure(figsize=(width, height), layout=layout)
    figure.suptitle(title)
    figure.text(
        0.1 / width,
        0.06 / height,
        "\n".join(lines),
        fontsize=FOOTER_SIZE,
        color=PALE,
        va="bottom",
        linespacing=1.25,
    )
    return figure
