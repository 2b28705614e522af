"""Test that the programs of docs/recipes.md run and train as described."""

import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_ext

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
Space = dict[str, Any]
# A gradient has at most 16 numbers on its way that are rounded to FP16, by 2**-11 of them.
ROUNDINGS = 16 * 2.0**-11


SECTIONS = re.split(r"^#+ (?=[A-Z]|torch)", TEXT, flags=re.MULTILINE)[1:]
PROGRAMS = {
    section.split("\n", 1)[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    for section in SECTIONS
}
"""The programs by their headings; the common beginning is under the title."""
BEST = '"cuda" if torch.cuda.is_available() else "cpu"'


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recipe", ModuleType("recipe"))


def beginning(count: int = 8, overflow: int | None = None, device: str = "cpu") -> Space:
    """Return the common beginning, with fewer batches or one with non-finite gradients."""
    sys.modules["recipe"] = module = ModuleType("recipe")  # torch.compile looks for it
    space = vars(module)
    exec(PROGRAMS["Recipes"].replace(BEST, f'"{device}"'), space)
    if overflow is not None:
        space["batches"][overflow][0].fill_(math.inf)
    del space["batches"][count:]
    return space


def run(heading: str, count: int = 8, overflow: int | None = None, device: str = "cpu") -> Space:
    space = beginning(count, overflow, device)
    exec(PROGRAMS[heading], space)
    return space


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the gradients of AdamW's first step, or a decayed sum of those of several steps."""
    (group,) = optimizer.param_groups
    moments = flat(optimizer.state[parameter]["exp_avg"] for parameter in group["params"])
    return moments / (1 - group["betas"][0])


def steps(optimizer: torch.optim.Optimizer) -> set[float]:
    return {state["step"].item() for state in optimizer.state.values()}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = ROUNDINGS) -> None:
    assert (actual - expected).norm() <= tolerance * expected.norm()


def test_gradient_accumulation() -> None:
    """Accumulation equals batches four times as large.

    Every FP16 number is the same, since losses differ by a power of two; sums in FP32, of 64 terms
    that may cancel, have another order.
    """
    name = "Gradient accumulation"
    model = run(name, count=0)["model"]
    optimizer, scaler = amp_ext.optim.AdamW(model.parameters(), lr=1e-2), amp_ext.GradScaler("cpu")
    batches = beginning()["batches"]
    for large in (batches[:4], batches[4:]):
        inputs, targets = map(torch.cat, zip(*large, strict=True))
        optimizer.zero_grad()
        with amp_ext.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    space = run(name)
    assert steps(space["optimizer"]) == {2}
    assert_near(gradients(space["optimizer"]), gradients(optimizer), 64 * 2.0**-20)


def test_gradient_penalty() -> None:
    """The gradients of loss and penalty equal FP32's; the loss's gradients alone do not."""
    name = "Gradient penalty"
    model, space = run(name, count=0)["model"], run(name, count=1)
    inputs, targets = space["batches"][0]
    outputs = model(inputs)
    loss = F.mse_loss(outputs, targets)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    penalty = (slopes.norm(dim=1) - 1).square().mean()
    grads = torch.autograd.grad(loss + 10 * penalty, model.parameters(), retain_graph=True)
    assert_near(gradients(space["optimizer"]), flat(grads))
    without = torch.autograd.grad(loss, model.parameters())
    assert (flat(without) - flat(grads)).norm() > flat(grads).norm() / 2
    assert steps(run(name)["optimizer"]) == {8}, "the scale fits"


def test_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = run("Resuming from a checkpoint", overflow=1)
    batches = beginning(overflow=1)["batches"]  # and the generator is where the program began
    model, optimizer, scaler = space["start"]()
    space["train"](model, optimizer, scaler, batches)
    assert flat(space["model"].parameters()).equal(flat(model.parameters()))
    assert gradients(space["optimizer"]).equal(gradients(optimizer))
    assert space["scaler"].state_dict() == scaler.state_dict()
    assert steps(space["optimizer"]) == {7}
    assert scaler.get_scale() == 2.0**17, "grown twice"


# An overflow in the sixth of eight batches skips a step. Each function checks other consequences.
AFTERWARDS: dict[str, Callable[[Space], Any]] = {
    "A GAN": lambda space: (steps(space["optimizer_d"]), steps(space["optimizer_g"])) == ({7}, {8}),
    "A learning rate schedule": lambda space: space["scheduler"].last_epoch == 7,
    "LoRA": lambda space: (
        {layer.base.weight.dtype for layer in space["model"][::2]} == {torch.float16}
    ),
    "An average of the weights (EMA)": lambda space: space["average"].n_averaged == 7,
}


assert AFTERWARDS.keys() <= PROGRAMS.keys()


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "Recipes"])
def test_every_program_skips_an_overflow(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    space = run(name, device=device, overflow=5)
    assert space["scaler"]._scale.device.type == device
    assert space["scaler"].get_skipped_steps() == 1
    finite = [flat(v.parameters()).isfinite() for v in space.values() if isinstance(v, nn.Module)]
    assert torch.cat(finite).all()
    assert AFTERWARDS.get(name, lambda space: True)(space)
