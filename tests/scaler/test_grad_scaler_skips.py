"""Test skipped steps: too many in a row, a limit of the norm, a static scale."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import amp_ext.optim
from cases import unwritten
from twins import OURS, StepsByScalars, grads, leaf, params, sgd, started

KINDS: dict[str, Callable[[torch.Tensor], Optimizer]] = {
    "plain": sgd,
    "fused": lambda param: torch.optim.SGD([param], lr=0.5, fused=True),
    "scalars": lambda param: StepsByScalars([param], lr=0.5),
    "amp_ext.optim": lambda param: amp_ext.optim.SGD([param], lr=0.5),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def take_steps(scaler: Any, *values: float, max_norm: float | None = None) -> None:
    for value in values:
        optimizer = sgd(leaf([value], device=scaler._scale.device.type))
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()


# ---- too many in a row -------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "step_was_skipped": lambda scaler: scaler.step_was_skipped,
    "get_skipped_steps": lambda scaler: scaler.get_skipped_steps(),
    "get_scale": lambda scaler: scaler.get_scale(),
    "state_dict": lambda scaler: scaler.state_dict(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS)
def test_too_many_skips_in_a_row(read: str) -> None:
    """Too many skips in a row raise once, at any read, and again for another run of skips."""
    scaler = started(OURS, 64.0, max_consecutive_skips=3)
    take_steps(scaler, math.inf, math.inf, 1.0, math.inf, math.inf)
    READS[read](scaler)
    for _ in range(2):
        optimizer = sgd(leaf([math.inf, 1.0]))
        optimizer.param_groups[0]["param_names"] = ["head.weight"]
        scaler.step(optimizer)
        scaler.update()
        text = (
            r"the last 3 steps have been skipped.*max_consecutive_skips=3(.|\n)*head\.weight: 1 inf"
        )
        with pytest.raises(RuntimeError, match=text):
            READS[read](scaler)
        READS[read](scaler)
        take_steps(scaler, 1.0)
        READS[read](scaler)
        take_steps(scaler, math.inf, math.inf)


def test_another_run_of_skips_is_another_error() -> None:
    """Another run of skips is another error, also without a read between the two."""
    scaler = started(OURS, 2.0**20, max_consecutive_skips=2)
    for values in ([math.inf] * 2, [1.0, math.inf, math.inf], [math.inf] * 2):
        take_steps(scaler, *values)
        with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
            scaler.get_scale()
    take_steps(scaler, math.inf)
    scaler.get_scale()


def test_a_loaded_state_starts_the_run_of_skips_again() -> None:
    """Training continues from a checkpoint after too many skips."""
    scaler = started(OURS, max_consecutive_skips=2)
    good = copy.deepcopy(scaler.state_dict())
    take_steps(scaler, math.inf, math.inf)
    with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
        scaler.get_scale()
    take_steps(scaler, math.inf)
    scaler.load_state_dict(good)
    take_steps(scaler, math.inf)
    assert scaler.get_scale() == good["scale"] / 2


def test_an_update_that_fails_counts_no_skip() -> None:
    scaler = started(OURS, max_consecutive_skips=2)
    scaler.step(sgd(leaf(math.inf)))
    for _ in range(2):
        with pytest.raises(AssertionError):
            scaler.update(torch.ones(2))
    scaler.update()
    assert scaler.get_skipped_steps() == 1


def test_a_skip_before_a_new_scale_counts_in_a_row() -> None:
    """An update to a new scale without a step leaves the run of skips unchanged."""
    scaler = started(OURS, max_consecutive_skips=2)
    scaler.step(sgd(leaf(math.inf)))
    scaler.update(16.0)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    take_steps(scaler, math.inf)
    with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
        scaler.get_scale()


def test_too_many_skips_whose_gradients_are_gone() -> None:
    scaler, optimizer = started(OURS, max_consecutive_skips=1), sgd(leaf(math.inf))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="of 0 gradients none is infinite"):
        scaler.get_scale()


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "3"])
def test_bad_max_consecutive_skips(value: Any) -> None:
    with pytest.raises(ValueError, match="max_consecutive_skips must be an integer from 1"):
        OURS("cpu", max_consecutive_skips=value)


# ---- a limit of the norm -----------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_norm_above_the_limit_skips(unscale_first: bool, kind: str) -> None:
    """A norm above the limit skips the step, and the scale goes on as without an overflow."""
    scaler = started(OURS, growth_interval=2, skip_above_norm=5.0)
    seen = []
    for value, scale in ((20.0, 4.0), (20.5, 4.0), (math.inf, 8.0), (8.0, 4.0)):
        optimizer = KINDS[kind](leaf([value]))
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        assert scaler.get_scale() == scale
        scaler.step(optimizer)
        scaler.update()
        skipped = params(optimizer)[0].item() == 1.0
        seen.append((skipped, scaler.step_was_skipped, scaler.get_skipped_steps()))
    assert seen == [(False, False, 0), (True, True, 1), (True, True, 2), (False, False, 2)]


def test_skips_by_the_norm_count_in_a_row() -> None:
    scaler = started(OURS, 1.0, skip_above_norm=5.0, max_consecutive_skips=2)
    take_steps(scaler, 6.0, max_norm=1.0)
    assert scaler.step_was_skipped
    take_steps(scaler, 6.0, max_norm=1.0)
    with pytest.raises(
        RuntimeError, match=r"the last 2 steps have been skipped.* above skip_above_norm=5"
    ):
        scaler.get_skipped_steps()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_skip_above_norm(value: float) -> None:
    with pytest.raises(ValueError, match="skip_above_norm must be positive"):
        OURS("cpu", skip_above_norm=value)


# ---- a scale that stays ------------------------------------------------------------------------


@every_kind
def test_a_scale_that_is_not_dynamic(kind: str) -> None:
    scaler = started(OURS, 1.0, growth_interval=1, dynamic=False)
    for value, skipped in ((1.0, False), (math.nan, True), (1.0, False)):
        optimizer = KINDS[kind](leaf([value], torch.bfloat16))
        with unwritten(grads(optimizer)):  # the factor is 1
            scaler.step(optimizer)
        scaler.update()
        assert (scaler.step_was_skipped, scaler.get_scale()) == (skipped, 1.0)
        assert (params(optimizer)[0].item() == 1.0) == skipped
    assert scaler.get_skipped_steps() == 1
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
