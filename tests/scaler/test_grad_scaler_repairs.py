"""GradScaler where users repair, replace or repeat parts of a step, as torch's scaler allows."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.nn import Parameter

from amp_ext.scaler import GradScaler

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


@every_scaler
def test_unfused_optimizer_without_gradients(scaler_class: Any) -> None:
    """torch raises, and so do we."""
    scaler, _ = _started(scaler_class)
    optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


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


@pytest.mark.parametrize("steps", [False, True])
def test_plain_state_of_one_optimizer(steps: bool) -> None:
    """A state that the user has refreshed after unscaling serves the step and the update."""
    scaler, param = _started()
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler._check_inf_per_device(optimizer)
    scaler._per_optimizer_states[id(optimizer)] = _refresh_per_optimizer_state()
    assert not scaler.overflow_report().overflow
    if steps:
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [0.0, 0.0]
    else:
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.update()


def test_update_that_raises_counts_nothing() -> None:
    """Once corrected, the same update counts one skipped step."""
    scaler, param = _started(max_consecutive_skips=3, skip_above_norm=1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad[0] = torch.inf
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.set_backoff_factor("x")
    with pytest.raises(TypeError):
        scaler.update()
    scaler.set_backoff_factor(0.5)
    scaler.update()
    assert scaler._numbers.consecutive_skips.item() == 1
    assert scaler.get_skipped_steps() == 1
    assert scaler.get_scale() == 2.0


def test_norm_above_the_limit_is_counted_once() -> None:
    """An update that raised has not counted the norm either."""
    scaler, param = _started(skip_above_norm=1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.set_backoff_factor("x")
    with pytest.raises(TypeError):
        scaler.update()
    scaler.set_backoff_factor(0.5)
    scaler.update()
    assert scaler.get_skipped_steps() == 1
