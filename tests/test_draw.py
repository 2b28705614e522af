"""What is drawn: the words in figures, and files that are the same every time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


@pytest.fixture
def bench() -> SimpleNamespace:
    import draw
    import figures

    return SimpleNamespace(draw=draw, figures=figures)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_figure_is_the_same_file_whatever_the_settings_outside(bench, tmp_path, suffix):
    times = {"amp_ext": [1.0, 2.0, 3.0], "torch": [2.0, 3.0, 4.0]}
    figure = bench.figures.Figure("steps", "Steps", ["some CPU"], {"cases": {"a case": times}})
    once, again = (tmp_path / f"{name}.{suffix}" for name in ("once", "again"))
    bench.draw.write(figure, once)
    with matplotlib.rc_context({"font.size": 20, "axes.labelsize": 20, "svg.hashsalt": ""}):
        bench.draw.write(figure, again)
        assert matplotlib.rcParams["font.size"] == 20, "and leaves them alone"
    assert once.read_bytes() == again.read_bytes()
    assert figure.digest.encode() in once.read_bytes()


@pytest.mark.parametrize(
    ("overflows", "labels"),
    [([2, 3], ["amp_ext", "overflow put in"]), ([], ["amp_ext"])],
    ids=["overflows", "none"],
)
def test_one_of_the_overflows_is_in_the_legend(bench, overflows, labels):
    training = {
        "provider": "amp_ext",
        "scales": [4.0, 4.0, 2.0],
        "skipped": overflows,
        "overflows": overflows,
        "growth_interval": 25,
    }
    figure = bench.figures.Figure("history", "History", [], {"trainings": [training]})
    scale, count = bench.draw.history(figure).axes
    assert [text.get_text() for text in scale.get_legend().get_texts()] == labels
    for axes in (scale, count):
        assert len(axes.lines) == 1 + len(overflows)


def test_words_in_the_cells_of_a_heatmap(bench):
    def cell(ratio: float | None, to: str = "torch", refused: bool = False) -> dict:
        return {"ratio": ratio, "to": to, "refused": refused}

    cells = [[cell(1.0), cell(2.0, to="fp32")], [cell(None, refused=True), cell(None)], [None] * 2]
    columns = ["fp16\namp_ext", "bf16\namp_ext"]
    data = {"rows": ["8^3", "16^3", "32^3"], "columns": columns, "cells": cells}
    axes = bench.draw.heatmap(bench.figures.Figure("heatmap", "Ratios", [], data)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "2.00*", "refused", ""]
    assert axes.get_xlabel().endswith("\n* the time of torch, FP32")
