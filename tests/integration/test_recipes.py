"""Test that the programs of docs/recipes.md run and train as described."""

from __future__ import annotations

import copy
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
from torch import Tensor

import amp_ext
from autocast_cases import Seen

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
Space = dict[str, Any]
FP16 = torch.float16
# A gradient has at most 16 numbers on its way that are rounded to FP16, by 2**-11 of them.
ROUNDINGS = 16 * 2.0**-11


def programs() -> dict[str, str]:
    """Return the programs by their headings; the common beginning is under the title."""
    found = {}
    for section in re.split(r"^#+ (?=[A-Z]|torch)", TEXT, flags=re.MULTILINE)[1:]:
        heading = section.split("\n", 1)[0]
        (found[heading],) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


PROGRAMS = programs()
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


def averages(optimizer: torch.optim.Optimizer) -> Tensor:
    (group,) = optimizer.param_groups
    return flat(optimizer.state[parameter]["exp_avg"] for parameter in group["params"])


def gradients(optimizer: torch.optim.Optimizer, before: Tensor | float = 0.0) -> Tensor:
    """Recover the unscaled gradients of AdamW's last step from its first moments.

    `before` holds the first moments before that step: 0 if it is the first step.
    """
    decay = optimizer.param_groups[0]["betas"][0]
    return (averages(optimizer) - decay * before) / (1 - decay)


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
        with amp_ext.autocast("cpu", FP16):
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    space = run(name)
    assert steps(space["optimizer"]) == {2}
    assert_near(gradients(space["optimizer"]), gradients(optimizer), 64 * 2.0**-20)


def test_gan() -> None:
    name = "A GAN"
    after, start = run(name, count=2), run(name, count=1)
    noise = torch.randn(16, 4)  # the generator is where it is at the second batch
    real, _ = after["batches"][1]
    fake, judge = start["generator"](noise), start["discriminator"]
    loss_d = (judge(real) - 1).square().mean() + judge(fake.detach()).square().mean()
    loss_g = (after["discriminator"](fake) - 1).square().mean()  # after its step
    for optimizer, loss, network in (
        ("optimizer_d", loss_d, judge),
        ("optimizer_g", loss_g, start["generator"]),
    ):
        grads = torch.autograd.grad(loss, network.parameters())
        assert_near(gradients(after[optimizer], averages(start[optimizer])), flat(grads))

    space = run(name, overflow=3)
    assert (steps(space["optimizer_d"]), steps(space["optimizer_g"])) == ({7}, {8})
    scaler = space["scaler"]
    assert (scaler.get_scale(), scaler.get_skipped_steps()) == (2.0**15, 1)
    assert scaler._get_growth_tracker() == 4, "one update for each iteration"


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


def test_several_losses() -> None:
    name = "Several losses"
    start, space = run(name, count=0), run(name, count=1)
    inputs, targets = space["batches"][0]
    value, size = start["heads"](torch.tanh(start["trunk"](inputs))).split(1, dim=1)
    loss = F.mse_loss(value, targets) + F.l1_loss(size, targets.abs())
    grads = torch.autograd.grad(loss, [*start["trunk"].parameters(), *start["heads"].parameters()])
    assert_near(gradients(space["optimizers"][0]), flat(grads[:2]))
    moved = flat(start["heads"].parameters()) - flat(space["heads"].parameters())
    assert_near(moved / 1e-2, flat(grads[2:]))
    space = run(name, overflow=3)
    assert steps(space["optimizers"][0]) == {7}
    assert space["scaler"].get_skipped_steps() == 1


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


def test_learning_rate_schedule() -> None:
    space = run("A learning rate schedule", overflow=3)
    assert steps(space["optimizer"]) == {7}
    assert space["scheduler"].last_epoch == 7
    (rate,) = space["scheduler"].get_last_lr()
    assert rate == pytest.approx(1e-2 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_lora() -> None:
    name = "LoRA"
    model, start = run(name)["model"], run(name, count=0)["model"]
    merged = copy.deepcopy(model)
    for index in (0, 2):
        layer = model[index]
        assert layer.base.weight.dtype == FP16
        assert layer.base.weight.equal(start[index].base.weight)
        for adapter in ("up", "down"):
            weights = [getattr(network[index], adapter).weight for network in (model, start)]
            assert weights[0].dtype == torch.float32
            assert not weights[0].equal(weights[1])
        merged[index] = copy.deepcopy(layer.base).float()
        merged[index].weight.data += layer.up.weight.data @ layer.down.weight.data
    inputs = torch.randn(16, 8)
    with amp_ext.autocast("cpu", FP16), torch.no_grad():
        assert_near(model(inputs).float(), merged(inputs).float())


def products_and_weights(
    monkeypatch: pytest.MonkeyPatch, heading: str, **changes: Any
) -> tuple[int, Tensor]:
    with monkeypatch.context() as patch, Seen() as seen:
        for attribute, value in changes.items():
            patch.setattr(torch.utils.checkpoint, attribute, value)
        model = run(heading)["model"]
    return seen.gemms, flat(model.parameters())


def kept_nothing(*args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.noop_context_fn()


def not_checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args)


def test_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing gives the same bits, dropout included, with more products."""
    name = "Activation checkpointing"
    count, weights = products_and_weights(monkeypatch, name)
    plain_count, plain_weights = products_and_weights(
        monkeypatch, name, checkpoint=not_checkpointed
    )
    assert weights.equal(plain_weights)
    assert count > plain_count


def test_selective_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Selective activation checkpointing"
    count, weights = products_and_weights(monkeypatch, name)
    plain_count, plain_weights = products_and_weights(
        monkeypatch, name, checkpoint=not_checkpointed
    )
    most, _ = products_and_weights(
        monkeypatch, name, create_selective_checkpoint_contexts=kept_nothing
    )
    assert weights.equal(plain_weights)
    assert plain_count == count < most


def test_average_of_the_weights() -> None:
    name = "An average of the weights (EMA)"
    model, average = (run(name, count=2)[key] for key in ("model", "average"))
    first = run(name, count=1)["model"]
    assert_near(
        flat(average.module.parameters()),
        0.9 * flat(first.parameters()) + 0.1 * flat(model.parameters()),
        2.0**-20,
    )
    space = run(name, overflow=3)
    assert space["average"].n_averaged == 7
    assert flat(space["average"].module.parameters()).isfinite().all()
    assert steps(space["optimizer"]) == {7}


def test_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives the same bits without the compiler's own kernels."""
    compiled = functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    weights = []
    for compile_as in (compiled, lambda **options: lambda function: function):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", compile_as)
            weights.append(flat(run("torch.compile")["model"].parameters()))
    assert weights[0].equal(weights[1])


@pytest.mark.parametrize("device", ["cuda"] if torch.cuda.is_available() else [])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "Recipes"])
def test_on_a_gpu(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs run on a GPU, with weaker checks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    space = run(name, device=device, overflow=5)
    assert space["scaler"]._scale.device.type == "cuda"
    assert space["scaler"].get_skipped_steps() == 1


def test_every_program_is_tested() -> None:
    """Every program is tested, and short enough to read at once."""
    tested = re.findall(r'(?:    name = |run\()"([^"]*)"', Path(__file__).read_text())
    assert {*PROGRAMS} == {"Recipes", *tested}
    assert max(text.count("\n") for text in PROGRAMS.values()) <= 31
