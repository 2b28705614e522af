"""Test the seed programs, and the rules of mixed precision that they rely on.

The rules hold under amp_ext.autocast and under torch.autocast after amp_ext.install().
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_ext
from executors import EXECUTORS

FP16, FP32 = torch.float16, torch.float32
Region = Callable[..., Any]

DEVICES = [
    pytest.param(executor.device, id=executor.name)
    for executor in EXECUTORS
    if executor.name in ("cpu", "cuda") and not executor.missing
]
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(params=["amp_ext.autocast", "installed"])
def autocast(request: pytest.FixtureRequest) -> Iterator[Region]:
    if request.param == "amp_ext.autocast":
        yield amp_ext.autocast
        return
    amp_ext.install()
    yield torch.autocast
    amp_ext.uninstall()


def fp16(region: Region, device: torch.device) -> Any:
    return region(device.type, dtype=FP16)


# ---- large logits ------------------------------------------------------------------------------


def fp32_logits(device: torch.device) -> Tensor:
    return torch.tensor([[1000.0, 0.0]], device=device)


def logits_of_a_layer(device: torch.device) -> Tensor:
    """Return FP16 logits from a layer within a region; 1000 is exact in FP16."""
    logits = F.linear(torch.ones(1, 1, device=device), fp32_logits(device).T)
    assert logits.dtype == FP16
    return logits


@every_device
@pytest.mark.parametrize("logits", [fp32_logits, logits_of_a_layer])
def test_large_logits(
    autocast: Region, device: torch.device, logits: Callable[[torch.device], Tensor]
) -> None:
    """Softmax and cross-entropy of large logits are finite, though exp(1000) is not."""
    with fp16(autocast, device):
        probabilities = F.softmax(logits(device), dim=1)
        values = logits(device).detach().requires_grad_()
        loss = F.cross_entropy(values, torch.tensor([1], device=device))
    loss.backward()
    assert values.exp().isinf().any()
    assert probabilities.tolist() == [[1.0, 0.0]]
    assert (loss.dtype, loss.item()) == (FP32, 1000.0)
    assert values.grad.tolist() == [[1.0, -1.0]]
    if device.type == "cuda":
        assert probabilities.dtype == FP32


# ---- a model in a region -----------------------------------------------------------------------


@every_device
def test_model_and_inputs_need_no_half(autocast: Region, device: torch.device) -> None:
    """A model of small integers is exact in FP16; its gradients and optimizer stay FP32.

    Values stay below 4 * 2 + 1 = 9, 8 * 9 + 1 = 73 and 4 * 73. The backward pass is outside the
    region.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    inputs = torch.randint(-2, 3, (16, 4)).float().to(device)
    expected = model(inputs)
    grads = torch.autograd.grad(expected.square().sum(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = amp_ext.GradScaler(device.type, init_scale=16.0)
    with fp16(autocast, device):
        hidden = model[0](inputs)
        result = model(inputs)
        loss = result.float().square().sum()
    assert (hidden.dtype, result.dtype, loss.dtype) == (FP16, FP16, FP32)
    assert result.float().equal(expected)
    assert model(inputs).equal(expected), "after the region it is FP32 again"
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert any(grad.count_nonzero() for grad in grads)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad.equal(grad)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {t.dtype for t in (*state, *grads, *model.parameters())} == {FP32}
    assert any(not a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


# ---- the programs as they are written ------------------------------------------------------------

PROGRAMS = Path(__file__).with_name("seed_programs.py")
OURS, TORCHS = "amp_ext.cuda.amp", "torch.cuda.amp"
LINE = "from {} import GradScaler, autocast\n"
here = pytest.mark.parametrize(
    "device", [torch.device("cuda" if torch.cuda.is_available() else "cpu")], ids=str
)
Program = Callable[[dict[str, Any]], Any]


def programs_of(package: str) -> dict[str, Any]:
    """Return the programs with one line changed: autocast and GradScaler come from the package."""
    text = PROGRAMS.read_text()
    assert text.count(LINE.format(TORCHS)) == 1
    space: dict[str, Any] = {"__name__": "seeds"}
    exec(text.replace(LINE.format(TORCHS), LINE.format(package)), space)
    return space


def small_images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(8, 1, 28, 28, generator=generator), torch.arange(8)) for _ in range(3)]


TRAININGS: dict[str, Program] = {
    "checkerboard": lambda space: space["checkerboard"](size=16, width=16, steps=6),
    "regression": lambda space: space["regression"](count=320, epochs=2),
    "digits": lambda space: space["digits"](small_images(), epochs=2),
    "checkerboard scripted": lambda space: space["checkerboard"](16, 16, steps=6, script=True),
}
OTHERS = {name: lambda space, name=name: space[name]() for name in ("operand_dtypes", "softmax")}


def run_seed(package: str, program: Program) -> tuple[Any, set[tuple[type, str]]]:
    """Return the result, and the warnings except torch.cuda.amp's deprecation."""
    torch.manual_seed(0)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.jit.optimized_execution(False),  # a GPU's driver compiles its fused kernels
    ):
        warnings.simplefilter("always")
        result = program(programs_of(package))
    said = {(w.category, str(w.message)) for w in caught if w.category is not FutureWarning}
    deprecations = [w for w in caught if "is deprecated. Please use `torch.amp" in str(w.message)]
    assert bool(deprecations) == (package == TORCHS)
    return result, said


@here
@pytest.mark.parametrize("name", TRAININGS)
def test_with_one_line_changed_it_trains(device: torch.device, name: str) -> None:
    """Each seed program trains with one line changed, on a GPU in FP16.

    Without a GPU, autocast and scaler warn and disable themselves, and training is FP32, bit for
    bit as with torch.cuda.amp.
    """
    (model, optimizer, scaler, outputs, losses), said = run_seed(OURS, TRAININGS[name])
    (theirs, *_, their_losses), they_said = run_seed(TORCHS, TRAININGS[name])
    assert type(scaler) is amp_ext.cuda.amp.GradScaler
    assert said == they_said
    half = len(losses) // 2
    assert sum(losses[half:]) < sum(losses[:half])
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {t.dtype for t in (*model.parameters(), *state)} == {FP32}
    if device.type == "cpu":
        assert not scaler.is_enabled()
        assert losses == their_losses
        assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    else:
        assert outputs.dtype == FP16
        assert scaler.get_skipped_steps() == 0


@here
@pytest.mark.parametrize("program", OTHERS.values(), ids=OTHERS)
def test_with_one_line_changed_it_says_the_same(device: torch.device, program: Program) -> None:
    result, said = run_seed(OURS, program)
    assert (result, said) == run_seed(TORCHS, program)
    if program is OTHERS["operand_dtypes"]:
        assert result == [FP32, FP32, FP16 if device.type == "cuda" else FP32]
    else:
        assert result == ([[1.0, 0.0]], 1000.0, FP32)
