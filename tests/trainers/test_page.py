"""Test that the lines of docs/trainers.md run unchanged and use amp_ext's scaler."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
from digits_program import Network, on_cuda

for package in ("lightning", "accelerate", "transformers", "timm"):
    pytest.importorskip(package, reason="needs it, as in make test-trainers")
pytestmark = on_cuda

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
SECTIONS = dict(re.findall(r"^#+ (.*?)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def names_of(section: str) -> dict[str, Any]:
    """Return the names defined by a section's blocks."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def scaler_of_transformers(names: dict[str, Any]) -> Any:
    arguments = names["transformers"].TrainingArguments(fp16=True, report_to=[])
    trainers = [names[kind](Network(), arguments) for kind in ("Trainer", "MyTrainer")]
    assert trainers[1].accelerator.scaler._max_consecutive_skips == 100
    return trainers[0].accelerator.scaler


LINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Lightning": lambda names: names["trainer"].precision_plugin.scaler,
    "Fabric": lambda names: names["fabric"].strategy.precision.scaler,
    "Accelerate": lambda names: names["accelerator"].scaler,
    "transformers": scaler_of_transformers,
    "timm": lambda names: names["loss_scaler"]._scaler,
    "Training frameworks": lambda names: torch.amp.GradScaler(),
}


@pytest.mark.parametrize("section", LINES)
def test_the_lines_put_our_scaler_in(section: str) -> None:
    assert isinstance(LINES[section](names_of(section)), amp_ext.GradScaler)
