"""Test overflows and refusals of GradScaler.clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_ext.optim
from cases import unwritten
from twins import (
    OURS,
    grads,
    leaf,
    outcome,
    params,
    plain,
    sgd,
    started,
)

optim = torch.optim

# ---- overflow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"allow_no_grads": True}], ids=["", "allow_no_grads"])
def test_overflow_of_gradients_that_are_dropped_afterwards(options: dict[str, Any]) -> None:
    """An overflow seen by unscale_ counts after its gradients are dropped, as with torch's clip."""
    optimizer, scaler = sgd(leaf([1.0, math.inf])), started(OURS, **options)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped
    assert scaler.get_scale() == 2.0


def test_flags_that_a_trainer_has_added_stay() -> None:
    """Flags added by a trainer stay, such as another rank's flag without gradients here."""
    optimizer, scaler = sgd(leaf([12.0, 16.0])), started(OURS)
    scaler.unscale_(optimizer)
    elsewhere = torch.device("meta")
    found_infs = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found_infs[elsewhere] = torch.ones(())
    scaler.clip_grad_norm_(optimizer, 1.0)
    left = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert {device.type: flag.item() for device, flag in left.items()} == {"cpu": 0.0, "meta": 1.0}


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_leaves_gradients_alone(fused: bool) -> None:
    good, bad = leaf([12.0, 16.0]), leaf([1.0, math.nan])
    optimizer, scaler = optim.SGD([good, bad], lr=0.5, fused=fused), started(OURS)
    with unwritten([*params(optimizer), *grads(optimizer)]):
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    assert not math.isfinite(norm.item())
    scaler.update()
    assert scaler.step_was_skipped
    assert scaler.get_scale() == 2.0


def test_gradient_that_is_spoilt_after_unscale() -> None:
    """A gradient spoilt after unscale_ skips the step; torch would step with NaNs."""
    optimizer, scaler = sgd(leaf([12.0, 16.0])), started(OURS)
    scaler.unscale_(optimizer)
    grads(optimizer)[0][1] = math.nan
    scaler.clip_grad_norm_(optimizer, 1.0)
    with unwritten(params(optimizer)):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_error_if_nonfinite_changes_nothing(unscale_first: bool) -> None:
    optimizer, scaler = sgd(leaf([12.0, math.nan])), started(OURS)
    if unscale_first:
        scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    before = plain(state)
    with (
        unwritten(grads(optimizer)),
        pytest.raises(RuntimeError, match="is non-finite, so it cannot"),
    ):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert plain(state) == before
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (["clip", "clip"], "clip_grad_norm_() has already been called on this optimizer since"),
        (["unscale_", "clip", "clip"], "clip_grad_norm_() has already been called on this"),
        (["clip", "unscale_"], "unscale_() has already been called on this optimizer since the"),
        (["step", "clip"], "clip_grad_norm_() is being called after step()."),
        (["clip", "step", "clip"], "clip_grad_norm_() is being called after step()."),
    ],
    ids=str,
)
def test_stages(calls: list[str], text: str) -> None:
    scaler, optimizer = started(OURS), sgd(leaf([12.0, 16.0]))

    def call(name: str) -> Any:
        if name == "clip":
            return scaler.clip_grad_norm_(optimizer, 1.0)
        return getattr(scaler, name)(optimizer)

    for name in calls[:-1]:
        call(name)
    with unwritten(grads(optimizer)):
        kind, error, said = outcome(lambda: call(calls[-1]))
    assert (kind, error) == ("raised", RuntimeError)
    assert text in said


@pytest.mark.parametrize(
    ("make", "max_norm", "error", "text"),
    [
        (lambda: OURS("cpu"), 1.0, AssertionError, "Attempted clip_grad_norm_ but _scale is None"),
        (lambda: started(OURS), -1.0, ValueError, "not negative, got -1.0"),
        (lambda: started(OURS), math.nan, ValueError, "not negative, got nan"),
    ],
)
def test_refused(
    make: Callable[[], Any], max_norm: float, error: type[Exception], text: str
) -> None:
    scaler, optimizer = make(), sgd(leaf([12.0, 16.0]))
    with unwritten(grads(optimizer)), pytest.raises(error, match=text):
        scaler.clip_grad_norm_(optimizer, max_norm)


def test_what_is_left_to_the_step() -> None:
    """After a clip left to the step, the norm is read-only and unscale_ is an error."""
    optimizer = amp_ext.optim.SGD([leaf([3.0])], lr=0.5)
    scaler = started(OURS)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    norm.mul_(2)
    with pytest.raises(RuntimeError, match="has been written in place before step"):
        scaler.step(optimizer)
