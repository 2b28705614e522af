"""Test the programs of docs/recipes_distributed.md on processes of the CPU.

All processes skip together, and the loss falls. test_scaler.py compares with one process.
"""

import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import amp_ext
import ranks

TEXT = (Path(__file__).parents[2] / "docs" / "recipes_distributed.md").read_text()
SECTIONS = re.split(r"^#+ ", TEXT, flags=re.MULTILINE)[1:]
PROGRAMS = {
    section.split("\n", 1)[0]: program
    for section in SECTIONS
    for program in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}
BEGINNING = PROGRAMS.pop("Set-up")
# A gradient has at most 32 numbers on its way that are rounded to FP16, by 2**-11 of them.
ROUNDINGS = 32 * 2.0**-11

CASES_OF_2: dict[str, Callable[..., None]] = {}
CASES_OF_4: dict[str, Callable[..., None]] = {}
Space = dict[str, Any]


def case(cases: dict[str, Any], heading: str) -> Callable[..., Any]:
    def register(function: Callable[[str], None]) -> None:
        cases[heading] = lambda *_: function(heading)

    return register


class Overflowing(amp_ext.GradScaler):
    """Give the last rank alone one infinite loss."""

    number: int

    def scale(self, loss: Any) -> Any:
        self.number -= 1
        is_here = self.number == 0 and distributed.get_rank() == distributed.get_world_size() - 1
        return super().scale(loss * math.inf if is_here else loss)


def run(heading: str, count: int = 16, overflow: int = 0, **replacements: str) -> Space:
    """Run a program with fewer batches, one infinite loss or other lines."""
    sys.modules["recipe"] = module = ModuleType("recipe")
    space, text = vars(module), PROGRAMS[heading]
    beginning = BEGINNING.replace("distributed.init_process_group()\n", "")
    exec(beginning.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"'), space)
    sequences = space["sequences"]
    space["sequences"] = lambda part: sequences(part)[:count]
    space["GradScaler"] = type("Overflowing", (Overflowing,), {"number": overflow})
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    exec(text, space)
    return space


def gathered(value: Any) -> list[Any]:
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def whole(tensors: Any) -> list[Tensor]:
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def assert_all_skip(heading: str, number: int, made: int) -> Space:
    """Assert that all ranks skip one step with an overflow on the last rank."""
    space = run(heading, overflow=number)
    scaler, states = space["scaler"], space["optimizer"].state.values()
    steps = {float(whole([state["step"]])[0]) for state in states}
    seen = scaler.get_scale(), scaler.get_skipped_steps(), float(space["norm"])
    assert (steps, *seen[:2]) == ({made}, 2.0**15, 1)
    assert gathered(seen) == [seen] * distributed.get_world_size()
    return space


def mean(value: Tensor) -> float:
    """Return the mean over all processes."""
    return sum(gathered(value.item())) / distributed.get_world_size()


@case(CASES_OF_2, "FP16 reinforcement learning with FSDP2")
def reinforcement_learning(heading: str) -> None:
    space = assert_all_skip(heading, number=3, made=7)
    rewards = torch.stack(space["rewards_seen"])
    assert mean(rewards[-4:].mean()) > mean(rewards[:4].mean()) + 0.1
    torch.manual_seed(0)
    start = space["LanguageModel"]().parameters()
    for before, after in zip(start, whole(space["reference"].parameters()), strict=True):
        assert before.equal(after)


@case(CASES_OF_2, "Pretraining with DDP")
def pretraining(heading: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = run(heading, count=2)["loss"]
        space = assert_all_skip(heading, number=3, made=7)
        saved = torch.load("checkpoint.pt") if distributed.get_rank() == 0 else None
    assert mean(space["loss"]) < 0.75 * mean(first)
    assert space["scheduler"].last_epoch == 7
    (saved, _) = gathered(saved)
    for ours, theirs in zip(space["model"].parameters(), saved[0].values(), strict=True):
        assert ours.equal(theirs)
    assert saved[3] == space["scaler"].state_dict()


@case(CASES_OF_4, "Tensor and sequence parallel")
def tensor_parallel(heading: str) -> None:
    first = run(heading, count=1)["loss"]
    space = assert_all_skip(heading, number=3, made=15)
    assert mean(space["loss"]) < 0.75 * mean(first)


@case(CASES_OF_2, "FSDP1")
def fsdp1(heading: str) -> None:
    first = run(heading, count=1)
    (lines,) = re.findall(r"^    (scaler.unscale_.*)\n    (norm = .*)$", TEXT, re.MULTILINE)
    clip = {"norm = scaler.clip_grad_norm_(optimizer, 1.0)": "\n    ".join(lines)}
    whole = run(heading, count=1, FULL_SHARD="NO_SHARD", **clip)
    assert float(whole["norm"]) == pytest.approx(float(first["norm"]), rel=ROUNDINGS)
    space = assert_all_skip(heading, number=3, made=15)
    assert mean(space["loss"]) < 0.75 * mean(first["loss"])


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    return [
        *ranks.run(__name__, 2, folder, "CASES_OF_2"),
        *ranks.run(__name__, 4, folder, "CASES_OF_4"),
    ]


@pytest.mark.parametrize("heading", PROGRAMS)
def test_on_ranks(heading: str, errors: list[dict[str, str]]) -> None:
    assert heading in CASES_OF_2 | CASES_OF_4
    assert [of_rank.get(heading) for of_rank in errors] == [None] * 6
