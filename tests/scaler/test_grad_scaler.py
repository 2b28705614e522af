"""Test that GradScaler trains as torch's: same scale, parameters, gradients and stages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

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
    sparse_leaf,
    started,
    state_of,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_trains_as_torch(fused: bool, device: str) -> None:
    """Each device trains as torch; test_grad_scaler_machine.py has more programs on the CPU."""

    def trained(scaler_class: ScalerClass) -> list[Any]:
        net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
        scaler = scaler_class(device, init_scale=128.0, growth_interval=2)
        states = []
        for index, inputs in enumerate(torch.randn(6, 5, 8).to(device)):
            optimizer.zero_grad()
            scaler.scale(net(inputs).square().mean()).backward()
            if index == 2:
                net[2].weight.grad[1, 3] = math.inf
            returned = scaler.step(optimizer)
            scaler.update()
            states.append([state_of(scaler, [optimizer]), returned])
        return states

    _, states = same_outcome(trained)
    scales = [state["scale"] for state, _ in states]
    assert scales == [128.0, 256.0, 128.0, 128.0, 256.0, 256.0], "one overflow and two growths"


# test_grad_scaler_machine.py has the errors of an order of calls.
ERRORS: dict[str, Callable[[ScalerClass], Any]] = {
    "check without scale": lambda s: s("cpu")._check_inf_per_device(sgd(leaf(1.0))),
    "closure by keyword": lambda s: started(s).step(sgd(leaf(1.0)), closure=lambda: 0.0),
    "no parameters": lambda s: started(s).unscale_(type("Any", (), {"param_groups": [{}]})()),
    "second initialisation": lambda s: started(s)._lazy_init_scale_growth_tracker("cpu"),
    "empty state": lambda s: s("cpu").load_state_dict({}),
    "part of a state": lambda s: s("cpu").load_state_dict({"scale": 1.0}),
}


@pytest.mark.parametrize("script", ERRORS.values(), ids=ERRORS)
def test_raises_as_torch(script: Callable[[ScalerClass], Any]) -> None:
    """Errors have torch's types and texts."""
    assert same_outcome(script)[0] == "raised"


@pytest.mark.parametrize("last", [32.0, 64000.0])
def test_fp16_sparse_gradients_overflow_when_coalesced(last: float) -> None:
    """Coalesced float16 gradients overflow, and replace the old gradient.

    Each 64000 fits, and their sum does not.
    """

    def script(scaler_class: ScalerClass) -> Any:
        optimizer = sgd(sparse_leaf(torch.float16, (1.0, 64000.0, last)))
        found_inf = started(scaler_class)._unscale_grads_(
            optimizer, torch.tensor([0.25]), torch.tensor([0.0]), True
        )
        return found_inf, grads(optimizer)

    _, (found_inf, _) = same_outcome(script)
    assert found_inf == {torch.device("cpu"): plain(torch.tensor([float(last > 32)]))}


def test_disabled_scaler_does_nothing() -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = scaler_class("cpu", enabled=False), sgd(leaf([4.0, math.inf]))
        loss = torch.tensor(3.0)
        seen = [scaler.scale(loss) is loss, scaler.scale([loss]) == [loss]]
        seen += [scaler.unscale_(optimizer), scaler.step(optimizer), scaler.update()]
        seen += [scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled()]
        seen += [scaler.load_state_dict(state) for state in ({}, {"amp_ext": "words"}, None)]
        return seen, scaler.state_dict(), grads(optimizer)

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
