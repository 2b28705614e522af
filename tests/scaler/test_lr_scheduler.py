"""Test amp_ext.optim.lr_scheduler: schedules that count the steps made."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from amp_ext.optim.lr_scheduler import SkipAware
from twins import KINDS, OURS, StepsByScalars, leaf, params, started


def train(scaler: Any, optimizer: Optimizer, schedule: Any, values: list[float]) -> list[float]:
    """Return the rate of each step, in halvings."""
    rates = []
    for value in values:
        rates.append(-math.log2(optimizer.param_groups[0]["lr"]))
        params(optimizer)[0].grad.fill_(value)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return rates


def halving(kind: str, **options: Any) -> tuple[Any, Optimizer, SkipAware]:
    optimizer, scaler = KINDS[kind]([leaf([1.0])], lr=1.0), started(OURS, 64.0)
    return scaler, optimizer, SkipAware(ExponentialLR(optimizer, 0.5), scaler, **options)


def test_skipped_steps_do_not_count() -> None:
    values = [math.inf, 1.0, math.inf, math.inf, 1.0, 1.0, 1.0]
    for kind, exact, rates in (
        ("host", False, [0, 0, 1, 1, 1, 2, 3]),
        ("fused", True, [0, 0, 1, 1, 1, 2, 3]),
        ("scalars", True, [0, 0, 1, 1, 1, 2, 3]),
        ("fused", False, [0, 1, 1, 2, 2, 2, 3]),  # one ahead after a skip
        ("amp_ext.optim", False, [0, 1, 1, 2, 2, 2, 3]),
        ("scalars", False, [0, 1, 1, 2, 2, 2, 3]),
    ):
        assert train(*halving(kind, exact=exact), values) == rates, (kind, exact)


def test_attributes_are_the_schedulers() -> None:
    """Attributes that are read or set are the scheduler's, as in a resumed training."""
    _, _, schedule = halving("host")
    schedule.last_epoch, schedule.gamma = 7, 0.25
    assert (schedule.scheduler.last_epoch, schedule.scheduler.gamma) == (7, 0.25)


def test_another_optimizers_overflow_does_not_count() -> None:
    scaler, optimizer, schedule = halving("scalars", exact=True)
    other = StepsByScalars([leaf([math.inf])], lr=1.0)
    scaler.step(other)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    assert (schedule.get_last_lr(), scaler.step_was_skipped) == ([0.5], True)


@pytest.mark.parametrize("into_another", [False, True])
def test_checkpoints(into_another: bool) -> None:
    """A checkpoint includes the schedule's pending steps, and torch's schedulers load it."""
    scaler, optimizer, schedule = halving("fused")
    train(scaler, optimizer, schedule, [1.0, math.inf])
    state = copy.deepcopy(schedule.state_dict())
    assert (state["last_epoch"], state["amp_ext_ahead"]) == (2, 1)
    plain = ExponentialLR(torch.optim.SGD([leaf([1.0])], lr=1.0), 0.5)
    plain.load_state_dict(state)
    assert plain.last_epoch == 2
    if into_another:
        scaler, optimizer, schedule = halving("fused")
        optimizer.param_groups[0]["lr"] = 0.25
    schedule.load_state_dict(state)
    assert schedule.scheduler.last_epoch == 2
    assert train(scaler, optimizer, schedule, [1.0, 1.0, 1.0]) == [2, 2, 3]


@pytest.mark.filterwarnings("ignore:Seems like")  # of torch's schedulers, whoever duplicates them
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_duplicate_goes_on(duplicate: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([leaf([1.0])], lr=1.0)
    schedule = SkipAware(ExponentialLR(optimizer, 0.5), started(OURS))
    twin, its_schedule = duplicate((optimizer, schedule))
    twin.step()
    its_schedule.step()
    assert twin.param_groups[0]["lr"] == 0.5
