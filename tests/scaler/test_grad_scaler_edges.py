"""Test GradScaler against wrong shortcuts: aliases, versions, foreign state, odd optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from twins import OURS, leaf, outcome, same_outcome, sgd, started


def test_backward_after_an_update_is_an_error() -> None:
    """A backward pass after an update is an error: the scaled loss holds the changed scale."""

    def script(scaler_class: Any) -> str:
        scaler, weight = scaler_class("cpu", init_scale=8.0, growth_interval=1), torch.ones(2)
        weight.requires_grad_()
        first = scaler.scale((weight * 1.0).sum() * 1.0)
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(sgd(weight))
        scaler.update()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        return scaler.get_scale()

    assert same_outcome(script)[1] == 16.0


def test_parameter_class_with_a_grad_of_its_own() -> None:
    class Own(torch.nn.Parameter):
        grad = property(lambda self: self.own)

    param = Own(torch.ones(2))
    param.own = torch.tensor([4.0, 8.0])
    started(OURS).unscale_(sgd(param))
    assert param.own.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (5, 2), (3, 3)])
def test_hysteresis_of_a_checkpoint(saved: int, loaded: int) -> None:
    """A tracker saved for another hysteresis starts anew."""
    own = {"skipped_steps": 1, "hysteresis": saved, "hysteresis_tracker": saved}
    scaler = started(OURS, hysteresis=loaded)
    scaler.load_state_dict(started(OURS).state_dict() | {"amp_ext": own})
    for overflows in range(1, loaded + 1):
        scaler.step(sgd(leaf(math.inf)))
        scaler.update()
        assert scaler.get_scale() == (2.0 if overflows == loaded else 4.0)


def test_momentum_that_was_written_survives_an_overflow() -> None:
    param = leaf([4.0, 8.0])
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True)
    optimizer.step()
    written = optimizer.state[param]["momentum_buffer"].clone()
    param.grad = torch.tensor([math.inf, 1.0])
    scaler = started(OURS)
    scaler.step(optimizer)
    assert optimizer.state[param]["momentum_buffer"].equal(written)


def test_step_without_weak_references() -> None:
    class Step:
        __slots__ = ()

        def __call__(self) -> str:
            return "stepped"

    optimizer = torch.optim.SGD([leaf([4.0])], lr=0.5, fused=True)
    optimizer.step = Step()
    assert outcome(lambda: started(OURS).step(optimizer)) == ("returned", "stepped")
