"""Test that GradScaler trains as torch's: same scale, parameters, gradients and stages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from twins import (
    DEVICES,
    OURS,
    THEIRS,
    ScalerClass,
    grads,
    leaf,
    plain,
    same_outcome,
    sgd,
    started,
    state_of,
)

optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam-fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
}


class Training:
    """Six steps of a small network; `damage` spoils a gradient before the third."""

    def __init__(self, scaler_class: ScalerClass, optimizer: str, device: str = "cpu"):
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.scaler = scaler_class(device, init_scale=128.0, growth_interval=2)
        self.inputs = torch.randn(6, 5, 8).to(device)
        self.history: list[Any] = []

    def loss(self, index: int) -> Tensor:
        return self.net(self.inputs[index]).square().mean()

    def damage(self, index: int) -> None:
        if index == 2:
            self.net[2].weight.grad[1, 3] = math.inf

    def note(self, *more: Any) -> None:
        self.history.append([state_of(self.scaler, [self.optimizer]), *plain(more)])

    def run(self, one_step: Callable[[Training, int], Any] | None = None) -> list[Any]:
        for index in range(len(self.inputs)):
            (one_step or Training.one_step)(self, index)
            self.note()
        return self.history

    def one_step(self, index: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(index)).backward()
        self.damage(index)
        self.note(self.scaler.step(self.optimizer))
        self.scaler.update()

    def penalized(self, index: int) -> None:
        """Gradient penalty: the scaled gradients are part of a graph of their own."""
        self.optimizer.zero_grad()
        loss = self.loss(index)
        scaled = torch.autograd.grad(
            self.scaler.scale(loss), self.net.parameters(), create_graph=True
        )
        inv_scale = 1.0 / self.scaler.get_scale()
        norm = sum((grad * inv_scale).square().sum() for grad in scaled).sqrt()
        self.scaler.scale(loss + norm).backward()
        self.damage(index)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def with_a_graph(self, index: int) -> None:
        """The gradients themselves require grad, as after backward(create_graph=True)."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(index)).backward(create_graph=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_torch(optimizer: str, device: str) -> None:
    if (optimizer, device) == ("adagrad-fused", "cuda"):
        pytest.skip("torch's Adagrad refuses fused on CUDA")
    kind, history = same_outcome(lambda scaler: Training(scaler, optimizer, device).run())
    assert kind == "returned"
    scales = [entry[0]["scale"] for entry in history[1::2]]
    assert scales == [128.0, 256.0, 128.0, 128.0, 256.0, 256.0], "one overflow and two growths"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam-fused"])
@pytest.mark.parametrize("step", [Training.penalized, Training.with_a_graph])
def test_ways_to_train(step: Callable[[Training, int], Any], optimizer: str) -> None:
    kind, *_ = same_outcome(lambda scaler: Training(scaler, optimizer).run(step))
    assert kind == "returned"


@pytest.mark.parametrize("duplicates", [1, 2])
def test_fp16_sparse_gradients_overflow_when_coalesced(duplicates: int) -> None:
    """Coalesced float16 gradients overflow, and replace the old gradient.

    Each 64000 fits, and their sum does not.
    """

    def script(scaler_class: ScalerClass) -> Any:
        param = torch.ones(5, dtype=torch.float16)
        indices = [[0, 3, 0 if duplicates == 2 else 1]]
        param.grad = torch.sparse_coo_tensor(
            indices,
            [64000.0, 32.0, 64000.0],
            (5,),
            dtype=torch.float16,
        )
        found_inf = started(scaler_class)._unscale_grads_(
            sgd(param), torch.tensor([0.25]), torch.tensor([0.0]), True
        )
        return found_inf, param.grad

    _, (found_inf, _) = same_outcome(script)
    assert found_inf == {torch.device("cpu"): plain(torch.tensor([float(duplicates == 2)]))}


def test_disabled_scaler_does_nothing() -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = scaler_class("cpu", enabled=False), sgd(leaf([4.0, math.inf]))
        loss = torch.tensor(3.0)
        seen = [scaler.scale(loss) is loss, scaler.scale([loss]) == [loss]]
        seen += [scaler.unscale_(optimizer), scaler.step(optimizer), scaler.update()]
        seen += [scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled()]
        return seen, scaler.state_dict(), grads(optimizer), scaler.load_state_dict({})

    assert same_outcome(script)[0] == "returned"


def test_is_torchs_class_by_name_arguments_and_attributes() -> None:
    assert OURS.__name__ == OURS.__qualname__ == "GradScaler"
    assert issubclass(OURS, THEIRS)
    ours, theirs = (inspect.signature(c).parameters for c in (OURS, THEIRS))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    for lazy in (False, True):
        scalers = [started(c) if lazy else c("cpu") for c in (OURS, THEIRS)]
        assert vars(scalers[0]).keys() >= vars(scalers[1]).keys()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=repr)
def test_internals_that_trainers_use(device: str | torch.device) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = scaler_class("cpu", init_scale=4.0), sgd(leaf([2.0, 6.0]))
        scaler._lazy_init_scale_growth_tracker(device)
        seen = [scaler._scale, scaler._growth_tracker, scaler._get_scale_async() is scaler._scale]
        seen += [scaler._check_inf_per_device(optimizer), grads(optimizer)]
        seen += [scaler._found_inf_per_device(optimizer), dict(scaler._per_optimizer_states[1])]
        scaler._per_optimizer_states = {id(optimizer): scaler._per_optimizer_states[id(optimizer)]}
        scaler.unscale_(optimizer)
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        return seen, stage is OptState.UNSCALED, grads(optimizer)

    assert same_outcome(script)[0] == "returned"
