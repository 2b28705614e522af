"""Test the effects of the rows of docs/migrating.md, table by table, in both languages."""

import copy
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_ext.compat.apex
import amp_ext.compat.keras

DOCS = Path(__file__).parents[2] / "docs"
Space = dict[str, Any]
STEPS = re.compile(r"(scaler|optimizer)\.step\(")
RUNS_BEFORE = "torch.cuda.amp", "Apex"  # the libraries of the others are not here


def tables(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the heading and the rows of each section with a table."""
    found = []
    for section in re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `(.+)` \| `(.+)` \|$", section, re.MULTILINE)
        lines = re.findall(r"^\|.*$", section, re.MULTILINE)
        assert len(lines) == len(rows) + 2 if lines else not rows
        if rows:
            found.append((section.split("\n", 1)[0], rows))
    return found


TABLES = tables("migrating.md")


def test_both_languages_have_the_same_rows() -> None:
    assert [rows for _, rows in tables("zh/migrating.md")] == [rows for _, rows in TABLES]
    pages = [(DOCS / page).read_text() for page in ("migrating.md", "zh/migrating.md")]
    assert pages[0].count("\n## ") == pages[1].count("\n## ")


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", amp_ext.compat.apex)  # as amp_ext.apex.install() does
    monkeypatch.setattr(amp_ext.compat.apex.amp._State, "options", None)


def a_program() -> Space:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 10))
    inputs, targets = torch.randn(4, 10), torch.randn(4, 10)
    return {
        "torch": torch,
        "nn": nn,
        "amp_ext": amp_ext,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss_fn": nn.functional.mse_loss,
        "inputs": inputs,
        "targets": targets,
        "scaler": amp_ext.GradScaler("cpu", 4.0),
        "loss": None,
    }


def run(line: str, space: Space) -> list[torch.dtype]:
    """Run a row on the CPU; return the types of the model's products."""
    types: list[torch.dtype] = []
    hooks = [
        layer.register_forward_hook(lambda *a: types.append(a[2].dtype))
        for layer in space["model"]
        if isinstance(layer, nn.Linear)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
        exec(line.replace("cuda", "cpu"), space)
    for hook in hooks:
        hook.remove()
    return types


def check_effect(line: str, space: Space, before: list[Any], types: list[torch.dtype]) -> None:
    """Check the effects of a row of amp_ext that its words show."""
    if "autocast(" in line:
        is_half = "float16" in line.replace("bfloat16", "")
        dtype = torch.float16 if is_half else torch.bfloat16
        expected = torch.float32 if "enabled=False" in line else dtype
        assert set(types) == {expected} and space["loss"].isfinite(), line
    if "init_scale" in line:
        assert space["scaler"].is_enabled() and space["scaler"].get_scale() == 1024.0, line
    if STEPS.search(line):
        changed = zip(before, space["model"].parameters(), strict=True)
        assert any(not torch.equal(old, new) for old, new in changed), line


@pytest.mark.parametrize("heading", [heading for heading, _ in TABLES])
def test_rows(heading: str) -> None:
    """Both columns run; rows of libraries that are not installed are only compiled."""
    space = a_program()
    rows = dict(TABLES)[heading]
    for before, after in rows:
        compile(before, heading, "exec")
        parameters = copy.deepcopy(list(space["model"].parameters()))
        check_effect(after, space, parameters, run(after, space))
    if any(name in heading for name in RUNS_BEFORE):
        space = a_program()
        parameters = copy.deepcopy(list(space["model"].parameters()))
        for before, _ in rows:
            run(before, space)
            if STEPS.search(before):
                assert not torch.equal(parameters[0], space["model"][0].weight)
