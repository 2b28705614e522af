"""Test amp_ext::update_scale_ against torch's op at the defaults, and its further options."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

import reference
from cases import assert_all_same, assert_same, copies, tensors
from executors import Executor, against_oracle, every_executor

FLT_MIN = 2.0**-126
SUBNORMAL = 2.0**-149
FLT_MAX = torch.finfo(torch.float32).max
SCALES = (
    *(0.0, -0.0, SUBNORMAL, 2.0**-130, FLT_MIN, 1.7 * FLT_MIN, 1e-10, 1.0, 3.3, 65536.0, 1e30),
    *(2.0**127, FLT_MAX, math.inf, math.nan, -4.0, -FLT_MIN, -SUBNORMAL),
)
FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
Values = dict[str, Any]


def state(executor: Executor, scale: float, tracker: int = 0, **options: Any) -> Values:
    """Return the tensors written by the op, and its options."""
    return {
        "scale": executor.scalar(scale),
        "growth_tracker": executor.scalar(tracker, torch.int32),
        "hysteresis_tracker": executor.scalar(options.get("hysteresis", 1), torch.int32),
        "skipped_steps": executor.scalar(0, torch.int64),
        **options,
    }


def update(
    by: Executor, values: Values, *found: float, growth=2.0, backoff=0.5, interval=2, ops=None
) -> tuple[float, int, int]:
    """Run the op with one found_inf per value; return scale, tracker and skipped steps."""
    found_infs = [by.scalar(value) for value in found]
    factors = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    (ops or by.ops).update_scale_(**values, found_infs=found_infs, **factors)
    return tuple(values[n].item() for n in ("scale", "growth_tracker", "skipped_steps"))


@every_executor
@pytest.mark.parametrize("scale", SCALES)
def test_equals_torch(executor: Executor, scale: float) -> None:
    """The op equals torch's, but for a floor and a growth at a tracker beyond the interval."""
    compared = 0
    numbers = itertools.product(
        (0, 1, 5, 100),
        (0.0, 1.0, -0.0, math.nan),
        (2.0, 1.0000001, 1e10),
        (0.5, 0.99999999, 1e-20),
        (2, 6, 101, 2**40),
    )
    for tracker, found, growth, backoff, interval in executor.some(list(numbers), 60):
        theirs, their_tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        torch._amp_update_scale_(
            theirs, their_tracker, torch.tensor(found), growth, backoff, interval
        )
        decays = found != 0 and scale > 0 and theirs < FLT_MIN
        if decays or (found == 0 and tracker >= interval):
            continue
        ours = state(executor, scale, tracker)
        update(executor, ours, found, growth=growth, backoff=backoff, interval=interval)
        assert_same(ours["scale"], theirs)
        assert_same(ours["growth_tracker"], their_tracker)
        compared += 1
    assert compared > 20


@every_executor
def test_any_of_many_found_infs_is_an_overflow(executor: Executor) -> None:
    flags = [executor.scalar(0.0) for _ in range(299)]
    for last, expected in ((-0.0, 4.0), (2.0, 2.0), (math.nan, 2.0)):
        values = state(executor, 4.0) | {"scale": torch.full((1,), 4.0, device=executor.device)}
        found_infs = [*flags, executor.scalar(last)]
        before = copies(found_infs)
        executor.ops.update_scale_(**values, found_infs=found_infs, **FACTORS)
        assert_all_same(found_infs, before)
        assert values["scale"].tolist() == [expected]
        assert values["skipped_steps"].item() == int(expected == 2.0)


@every_executor
def test_floor_and_ceiling(executor: Executor) -> None:
    """The scale stays within its limits; the smallest normal number is the floor by default."""
    for options, scale, found, expected in (
        ({}, 4 * FLT_MIN, 1.0, 2 * FLT_MIN),
        ({}, 1.5 * FLT_MIN, 1.0, FLT_MIN),
        ({}, FLT_MIN / 2, 1.0, FLT_MIN / 2),  # below the floor already: neither lowered nor lifted
        ({}, 0.0, 1.0, 0.0),
        ({"min_scale": 3.0}, 4.0, 1.0, 3.0),
        ({"min_scale": 3.0}, 2.0, 1.0, 2.0),
        ({"min_scale": SUBNORMAL}, FLT_MIN, 1.0, FLT_MIN / 2),
        ({"max_scale": 6.0}, 4.0, 0.0, 6.0),
        ({"max_scale": 6.0}, 7.0, 0.0, 7.0),  # above already: neither lifted nor lowered
        ({"max_scale": 1e30}, FLT_MAX, 0.0, FLT_MAX),
        ({"min_scale": 2.0, "max_scale": 2.0}, 2.0, 0.0, 2.0),
    ):
        values = state(executor, scale, **options)
        assert update(executor, values, found, interval=1)[0] == expected, (options, scale)


@every_executor
def test_tracker_at_and_beyond_the_interval(executor: Executor) -> None:
    """The scale grows once the tracker has reached the interval. Far beyond, the tracker wraps."""
    for tracker, interval, expected in (
        (50, 10, (16.0, 0)),  # an interval that was lowered, unlike torch
        (2**31 - 1, 2**31, (16.0, 0)),
        (2**31 - 1, 2**31 + 1, (8.0, -(2**31))),  # out of reach: the tracker wraps, as torch's
    ):
        values = state(executor, 8.0, tracker)
        assert update(executor, values, 0.0, interval=interval)[:2] == expected, tracker


@every_executor
def test_hysteresis(executor: Executor) -> None:
    """With hysteresis 3, the scale moves at the third overflow in a row and at later ones."""
    ours = state(executor, 64.0, hysteresis=3)
    sequence = (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
    assert [update(executor, ours, found, interval=1000) for found in sequence] == [
        *((64, 0, 1), (64, 0, 2), (64, 1, 2)),
        *((64, 0, 3), (64, 0, 4), (32, 0, 5), (16, 0, 6)),
        *((16, 1, 6), (16, 0, 7)),
    ]


@every_executor
def test_the_next_step_is_made_ready(executor: Executor) -> None:
    """The op prepares the next step: 1 / scale, a found_inf of 0, and the old found_inf.

    Old and new found_inf may be the same tensor. One third, and the reciprocal of 6, are exact in
    no format: their bits show the rounding.
    """
    next_step = torch.tensor([7.0, 1.0, 5.0], device=executor.device)
    values = state(executor, 12.0, next_step=next_step)
    found_infs = [next_step[1], executor.scalar(0.0)]
    executor.ops.update_scale_(**values, found_infs=found_infs, **FACTORS)
    assert next_step.tolist() == [torch.tensor(6.0).reciprocal(), 0, 1]
    assert update(executor, values, 0.0, growth=0.5, interval=1)[0] == 3.0
    assert next_step.tolist() == [torch.tensor(3.0).reciprocal(), 0, 0]
    next_step[1] = 1.0  # it counts where it is among the found_infs, and only there
    assert update(executor, values, 0.0, interval=9) == (3.0, 1, 1)
    assert next_step[2].item() == 1.0


@against_oracle
@settings(max_examples=400, deadline=None)
@given(
    scale=st.floats(width=32, allow_nan=False),
    tracker=st.integers(0, 10),
    found=st.lists(st.floats(width=32) | st.just(0.0), min_size=1, max_size=4),
    factors=st.fixed_dictionaries(
        {
            "growth": st.floats(1.0, 1e12, exclude_min=True),
            "backoff": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
            "interval": st.integers(1, 12),
        }
    ),
    options=st.fixed_dictionaries(
        {},
        optional={
            "min_scale": st.floats(0.0, width=32, exclude_min=True, allow_infinity=False),
            "max_scale": st.floats(0.0, width=32, exclude_min=True, allow_infinity=False),
            "hysteresis": st.integers(1, 4),
            "next_step": st.just(None),
        },
    ),
)
def test_any_numbers(
    executor: Executor, scale: float, tracker: int, found: list[float], factors: Any, options: Any
) -> None:
    """Any numbers agree over three updates in a row, with growth and hysteresis trackers."""
    if "next_step" in options:
        options["next_step"] = torch.tensor([0.0, 1.0, 0.0], device=executor.device)
    ours = state(executor, scale, tracker, **options)
    oracle = tree_map_only(torch.Tensor, torch.clone, ours)
    for values in (found, found, [0.0]):
        update(executor, ours, *values, **factors)
        update(executor, oracle, *values, **factors, ops=reference)
        assert_all_same(tensors(ours), tensors(oracle))
