"""GradScaler where a shortcut would go wrong: aliases, versions, foreign state, odd optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twins import OURS, THEIRS, grads, leaf, outcome, same_outcome, sgd, started


def test_backward_after_an_update_is_an_error() -> None:
    """The scaled loss holds on to the scale, which has changed since."""

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
    """A tracker that counts for another hysteresis starts anew."""
    own = {"skipped_steps": 1, "hysteresis": saved, "hysteresis_tracker": saved}
    scaler = started(OURS, hysteresis=loaded)
    scaler.load_state_dict(started(OURS).state_dict() | {"amp_ext": own})
    for overflows in range(1, loaded + 1):
        scaler.step(sgd(leaf(math.inf)))
        scaler.update()
        assert scaler.get_scale() == (2.0 if overflows == loaded else 4.0)


def test_views_with_holes_on_the_same_memory() -> None:
    memory, first, second = torch.full((8,), 4.0), torch.ones(4), torch.ones(4)
    first.grad = second.grad = None
    first.grad, second.grad = memory[::2], memory[::2]
    with pytest.raises(RuntimeError, match=r"grads\[0\] and grads\[1\] overlap in memory"):
        started(OURS).unscale_(sgd(first, second))
    assert memory.tolist() == [4.0] * 8


@pytest.mark.parametrize("touched", [False, True])
def test_momentum_of_a_skipped_first_step(touched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves it uninitialised; fresh memory is NaN here, as everywhere in this suite."""
    param = leaf([math.inf, 1.0])
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True)
    if touched:
        assert optimizer.state[param] == {}
    scaler = started(OURS)
    for grad in ([math.inf, 1.0], [4.0, 8.0]):
        param.grad = torch.tensor(grad)
        scaler.step(optimizer)
        scaler.update()
    assert param.isfinite().all()


def test_momentum_that_was_written_survives_an_overflow() -> None:
    param = leaf([4.0, 8.0])
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True)
    optimizer.step()
    written = optimizer.state[param]["momentum_buffer"].clone()
    param.grad = torch.tensor([math.inf, 1.0])
    scaler = started(OURS)
    scaler.step(optimizer)
    assert optimizer.state[param]["momentum_buffer"].equal(written)


def test_failed_step_gives_a_preset_grad_scale_back() -> None:
    class Fails(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            raise ValueError("no")

    optimizer = Fails([leaf([4.0])], lr=0.5)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="no"):
        started(OURS).step(optimizer)
    assert optimizer.grad_scale.item() == 2.0
    assert not hasattr(optimizer, "found_inf")


def test_step_without_weak_references() -> None:
    class Step:
        __slots__ = ()

        def __call__(self) -> str:
            return "stepped"

    optimizer = torch.optim.SGD([leaf([4.0])], lr=0.5, fused=True)
    optimizer.step = Step()
    assert outcome(lambda: started(OURS).step(optimizer)) == ("returned", "stepped")


@pytest.mark.parametrize("count", [2048, 2049])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_more_optimizers_than_one_launch_takes(count: int, value: float) -> None:
    from amp_ext import ops

    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    found: list[Tensor] = [torch.zeros(()) for _ in range(count - 1)] + [torch.full((1,), value)]
    ops.update_scale_(scale, tracker, found, 2.0, 0.5, 1)
    assert scale.item() == (4.0 if value else 16.0)


def test_long_pass_releases_the_interpreter() -> None:
    """Same results with owners and without the lock."""
    for scaler_class in (THEIRS, OURS):
        param = leaf(torch.full((1 << 20,), 8.0))
        optimizer = sgd(param)
        started(scaler_class).unscale_(optimizer)
        assert grads(optimizer)[0].eq(2.0).all()


@pytest.mark.parametrize("min_scale", [1e39, -1.0, math.nan])
def test_op_refuses_a_floor_that_is_no_float32(min_scale: float) -> None:
    from amp_ext import ops

    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="min_scale must be"):
        ops.update_scale_(scale, tracker, [torch.zeros(())], 2.0, 0.5, 1, min_scale=min_scale)
    assert (scale.item(), tracker.item()) == (8.0, 0)
