"""Steps of a scaler that takes the word of products: what comes of them, and what it says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from amp_ext import _C
from amp_ext._free_checks import REST
from amp_ext.nn import Linear, LinearActivation
from free_cases import INF, Training
from twins import OURS, Recording, ScalerClass, leaf, same_outcome, state_of

FUSED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.5, fused=True),
}


# ---- the same as with torch's scaler -----------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_training(make: Callable[..., Any], passes: int, accumulate: bool) -> None:
    judged = []

    def script(scaler_class: ScalerClass) -> Any:
        torch.manual_seed(1)
        network = nn.Sequential(LinearActivation(6, 7, activation="relu"), Linear(7, 5))
        for layer in network:
            layer.accumulate_grad = accumulate
        options = {"free_checks": True} if scaler_class is OURS else {}
        scaler = scaler_class("cpu", init_scale=2.0**14, growth_interval=2, **options)
        optimizer, states = make(network.parameters()), []
        for step in range(12):
            for number in range(passes):
                x = torch.randn(4, 6)
                if step in (3, 4, 8) and number == 0:
                    x[0, 0] = (INF, torch.nan, 1e38)[step % 3]
                with torch.autocast("cpu", torch.float16, enabled=step % 2 == 0):
                    out = network(x)
                scaler.scale(out.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            judged.append(getattr(scaler, "checked_in_backward", 0))
            states.append(state_of(scaler, [optimizer]))
            optimizer.zero_grad(set_to_none=step != 4)
        return states

    same_outcome(script)
    # Step 5 adds to gradients of zeros; where nothing is judged in it, later ones do not ask.
    free = [step > 0 and (accumulate or (passes == 1 and step < 5)) for step in range(12)]
    assert judged == 12 * [0] + [2 * is_free for is_free in free]


def test_scale_below_1() -> None:
    """A fused step may write infinities, behind autograd's back: the next optimizer sees them."""

    def script(scaler_class: ScalerClass) -> Any:
        torch.manual_seed(1)
        options = {"free_checks": True} if scaler_class is OURS else {}
        layer = Linear(6, 5, bias=False)
        scaler = scaler_class("cpu", init_scale=2.0**-20, **options)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5, fused=True) for _ in range(2)]
        scales = []
        for _ in range(3):
            scaler.scale(layer(torch.full((4, 6), 1e36)).sum() * 2.0**20).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scales.append(scaler.get_scale())
            scaler.update()
        return scales, layer.weight

    same_outcome(script)


# ---- when it asks ------------------------------------------------------------------------------


def taken(training: Training) -> int:
    training.step()
    return training.scaler.checked_in_backward


def test_first_step_is_read() -> None:
    training = Training()
    assert training.scaler.checked_in_backward == 0
    assert taken(training) == 1


def test_off_by_default() -> None:
    training = Training()
    training.scaler = OURS("cpu")
    training.step()
    assert taken(training) == 0
    training.backward()
    assert not _C.judges_gradients()


def test_optimizers_whose_gradients_are_unscaled() -> None:
    """They are read all the same: products are not asked."""
    training = Training()
    training.optimizer = torch.optim.SGD(training.layer.parameters(), lr=0.5)
    assert taken(training) == 0
    for prepare in (training.scaler.unscale_, lambda o: training.scaler.clip_grad_norm_(o, 1.0)):
        training.optimizer = FUSED["SGD"](training.layer.parameters())
        for _ in range(2):
            training.backward()
            prepare(training.optimizer)
            assert not _C.judges_gradients() or _ == 0
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.optimizer.zero_grad()
            assert training.scaler.checked_in_backward == 0


def test_nobody_asks_outside_of_steps() -> None:
    training = Training()
    assert not _C.judges_gradients()
    loss = training.loss()
    assert _C.judges_gradients()
    loss.backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert not _C.judges_gradients()


def test_disabled_scaler() -> None:
    scaler = OURS("cpu", enabled=False)
    assert scaler.scale(torch.ones(())) == 1.0
    assert scaler.checked_in_backward == 0


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_several_processes(monkeypatch: Any, initialized: bool, size: int) -> None:
    """Their collectives write to gradients, and autograd need not count it."""
    training = Training()
    monkeypatch.setattr(dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    free = not initialized or size == 1
    assert taken(training) == free
    monkeypatch.undo()
    training.backward()
    monkeypatch.setattr(dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    assert training.check() == (free, False)


def test_torchs_unscaling_is_not_counted() -> None:
    """It serves gradients of tensor subclasses, and the others of their optimizer with them."""
    training = Training()
    subclass = Recording(torch.ones(2))
    subclass.grad = Recording(torch.ones(2))
    training.backward()
    first = torch.optim.SGD([*training.layer.parameters()], lr=0.5)
    first.param_groups[0]["params"].append(subclass)
    training.scaler.unscale_(first)
    training.grad.data.fill_(INF)
    assert training.check() == (0, True)


def test_two_scalers() -> None:
    """What one of them forgets the other one reads."""
    one, other = Training(), Training()
    for training in (one, other):
        training.backward()
    assert one.check() == (1, False)
    one.scaler.update()
    other.grad.data.fill_(INF)
    assert other.check() == (0, True)


def test_rests_where_nothing_is_judged() -> None:
    training = Training()
    training.layer = nn.Linear(6, 5)
    training.optimizer = FUSED["SGD"](training.layer.parameters())
    asked = []
    for _ in range(2 * REST + 3):
        training.backward()
        asked.append(_C.judges_gradients())
        finish(training)
        training.optimizer.zero_grad()
    assert [step for step, did in enumerate(asked) if did] == [0, REST + 1, 2 * REST + 2]


@pytest.mark.parametrize(
    "duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_copies_of_a_scaler(duplicate: Callable[[Any], Any]) -> None:
    for wanted in (True, False):
        training = Training(free_checks=wanted)
        training.scaler = duplicate(training.scaler)
        training.step()
        assert taken(training) == wanted


# ---- what it says ------------------------------------------------------------------------------

WORDS = "1 gradient was judged by the product that wrote it; the scaler did not read it."


def finish(training: Training) -> Any:
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return training.scaler.overflow_report(training.layer)


def test_report_without_an_overflow() -> None:
    training = Training()
    assert str(training.scaler.overflow_report()) == "No overflow."
    training.backward()
    report = finish(training)
    assert (bool(report), report.overflow, report.checked_in_backward) == (False, False, 1)
    assert str(report) == f"No overflow.\n{WORDS}"


def test_report_of_an_overflow() -> None:
    training = Training()
    training.spoil(row=0)
    report = finish(training)
    assert [gradient.name for gradient in report.gradients] == ["weight", "bias"]
    assert report.checked_in_backward == 1
    assert str(report).splitlines()[0] == "2 of 2 gradients are not finite:"
    assert str(report).splitlines()[-1] == WORDS


@pytest.mark.parametrize("to_none", [False, True])
def test_report_that_comes_too_late(to_none: bool) -> None:
    training = Training()
    training.spoil()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad(set_to_none=to_none)
    said = str(training.scaler.overflow_report())
    assert said.startswith("There was an overflow, but")
    assert said.endswith(WORDS)


def test_report_of_several() -> None:
    training = Training(network=nn.Sequential(Linear(6, 7), Linear(7, 5)))
    training.backward()
    assert "2 gradients were judged by the products that wrote them; the scaler did not" in str(
        finish(training)
    )


def test_count_is_of_the_step_at_hand() -> None:
    training = Training()
    training.backward()
    assert finish(training).checked_in_backward == 1
    other = torch.optim.SGD([leaf([1.0])], lr=0.5, fused=True)
    training.scaler.step(other)
    assert training.scaler.checked_in_backward == 0
    training.scaler.update()
    assert training.scaler.checked_in_backward == 0
