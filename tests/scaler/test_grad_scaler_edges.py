"""Test GradScaler in edge cases: aliases, odd optimizers, repaired or repeated parts of a step."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.nn import Parameter

from amp_ext.scaler import GradScaler
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


# ---- parts of a step that users repair, replace or repeat ----------------------------------------


SCALERS = [torch.amp.GradScaler, GradScaler]
every_scaler = pytest.mark.parametrize("scaler_class", SCALERS, ids=["torch", "ours"])
fused_or_not = pytest.mark.parametrize("fused", [False, True])


def _started(scaler_class: Any = GradScaler, **options: Any) -> tuple[Any, Parameter]:
    scaler = scaler_class("cpu", init_scale=4.0, **options)
    param = Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    return scaler, param


@every_scaler
@fused_or_not
def test_gradients_that_are_repaired_after_unscaling(scaler_class: Any, fused: bool) -> None:
    """A second check starts from a new flag, and the step is made."""
    scaler, param = _started(scaler_class)
    optimizer = torch.optim.AdamW([param], fused=fused)
    param.grad[0] = torch.inf
    scaler.unscale_(optimizer)
    param.grad.nan_to_num_(posinf=0.0)
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    scaler.step(optimizer)
    scaler.update()
    assert param[1] != 1.0
    assert scaler.get_scale() == 4.0


def test_second_check_after_a_clip_keeps_the_overflow() -> None:
    """A clip leaves gradients scaled after an overflow, so the step must be skipped."""
    scaler, param = _started()
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad[0] = torch.inf
    scaler.clip_grad_norm_(optimizer, 1.0)
    param.grad.nan_to_num_(posinf=0.0)
    scaler._check_inf_per_device(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 1.0]
    assert scaler.step_was_skipped


@fused_or_not
def test_norm_of_parameters_above_the_limit_skips_after_a_second_clip(fused: bool) -> None:
    """The step and the report agree."""
    scaler = GradScaler("cpu", init_scale=1.0, skip_above_norm=1.0)
    p, q = Parameter(torch.ones(1)), Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p, q], lr=1.0, fused=fused)
    scaler.scale(10.0 * p.sum() + 0.1 * q.sum()).backward()
    scaler.clip_grad_norm_([p], 0.5)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert (p.item(), q.item()) == (1.0, 1.0)
    assert scaler.step_was_skipped


@pytest.mark.parametrize("clips", [False, True])
@every_scaler
def test_fused_optimizer_without_gradients(scaler_class: Any, clips: bool) -> None:
    """Its step after unscaling does nothing, and raises nothing."""
    scaler, param = _started(scaler_class)
    other = Parameter(torch.ones(2))
    optimizers = [torch.optim.AdamW([each], fused=True) for each in (param, other)]
    for optimizer in optimizers:
        if clips and scaler_class is GradScaler:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert param[0] != 1.0
    assert other.tolist() == [1.0, 1.0]


class _TorchsLastLine(GradScaler):
    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def _subclass() -> GradScaler:
    scaler = _TorchsLastLine("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    return scaler


def _pickled() -> GradScaler:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    return pickle.loads(pickle.dumps(scaler))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("made", [_subclass, _pickled])
def test_states_of_torchs_factory(made: Any, fused: bool) -> None:
    """A step works on states that are plain dicts."""
    scaler, param = made(), Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [-1.0, -1.0]


def test_plain_state_with_an_overflow() -> None:
    """A state that other code has written as a plain dict skips the step."""
    scaler, param = _started()
    optimizer = torch.optim.SGD([param], lr=1.0)
    flags = {torch.device("cpu"): torch.ones(())}
    state = {"stage": OptState.UNSCALED, "found_inf_per_device": flags}
    scaler._per_optimizer_states[id(optimizer)] = state
    scaler.step(optimizer)
    scaler.update()
    assert (param.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0)


@pytest.mark.parametrize(("value", "scale"), [(math.inf, 2.0), (8.0, 4.0)], ids=["inf", "norm"])
def test_update_that_raises_counts_nothing(value: float, scale: float) -> None:
    """Once corrected, the same update counts one skipped step."""
    scaler, param = _started(max_consecutive_skips=3, skip_above_norm=1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad[0] = value
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(AssertionError):
        scaler.update(torch.ones(2))
    scaler.set_backoff_factor("x")
    with pytest.raises(RuntimeError, match="backoff_factor"):
        scaler.update()
    scaler.set_backoff_factor(0.5)
    scaler.update()
    assert scaler._numbers.consecutive_skips.item() == 1
    assert scaler.get_skipped_steps() == 1
    assert scaler.get_scale() == scale
