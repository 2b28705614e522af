"""Test the options of GradScaler, its skipped steps, and deliberate differences from torch."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cases import unwritten
from twins import KINDS, OURS, every_kind, finish, grads, leaf, params, sgd, started


def run_steps(scaler: Any, *values: float, max_norm: float | None = None) -> None:
    """Step once per gradient value."""
    for value in values:
        optimizer = sgd(leaf([value], device=scaler._device))
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        finish(scaler, optimizer)


def scales_after(scaler: Any, values: list[float]) -> list[float]:
    """Step once per gradient value, and return the scale after each update."""
    scales = []
    for value in values:
        run_steps(scaler, value)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("kind", ["host", "fused", "scalars"])
def test_optimizer_without_gradients_is_accepted_when_allowed(kind: str) -> None:
    """A step without gradients counts as one without overflow, alone or beside another."""
    scaler = started(OURS, allow_no_grads=True, growth_interval=1)
    idle = KINDS[kind]([torch.ones(2)], lr=0.5)
    scaler.unscale_(idle)
    finish(scaler, idle)
    assert (scaler.get_scale(), scaler.step_was_skipped) == (8.0, False)

    busy = sgd(leaf(math.inf))
    finish(scaler, idle, busy)
    assert (scaler.get_scale(), scaler.step_was_skipped) == (4.0, True)


@pytest.mark.parametrize(
    ("options", "values", "scales"),
    [
        ({"scale": 2.0**-125}, [math.inf] * 2, [2.0**-126] * 2),
        ({"min_scale": 1.5}, [math.inf] * 3, [2.0, 1.5, 1.5]),
        ({"max_scale": 10.0, "growth_interval": 1}, [1.0] * 3, [8.0, 10.0, 10.0]),
        ({"hysteresis": 2}, [math.inf, 1.0, math.inf, math.nan, math.inf], [4, 4, 4, 2, 1]),
        ({"growth_interval": np.int64(2), "max_consecutive_skips": np.int64(9)}, [1, 1], [4, 8]),
        ({"growth_interval": torch.tensor(2)}, [1, 1], [4, 8]),
    ],
    ids=str,
)
def test_scale_options(options: dict[str, Any], values: list[float], scales: list[float]) -> None:
    assert scales_after(started(OURS, **options), values) == scales


BAD: dict[str, tuple[float, ...]] = {
    "min_scale": (-1.0, math.inf, math.nan),
    "max_scale": (0.0, math.nan),
    "skip_above_norm": (0.0, math.nan),
    "hysteresis": (1.5, 2**31),
    "max_consecutive_skips": (0,),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"GradScaler: {name} must be .*, got {value}"):
            OURS("cpu", **{name: value})
    with pytest.raises(ValueError, match=r"max_scale must be .*min_scale, got 4.0 and 8.0"):
        OURS("cpu", min_scale=8.0, max_scale=4.0)


def test_the_first_scale_in_inference_mode() -> None:
    """Training continues after an evaluation that scales a loss first."""
    scaler = OURS("cpu", init_scale=4.0, growth_interval=2, hysteresis=2, max_consecutive_skips=3)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())).item() == 4.0
    assert scales_after(scaler, [1.0, 1.0, math.inf, math.inf]) == [4.0, 8.0, 8.0, 4.0]
    assert scaler.get_skipped_steps() == 2


# ---- too many in a row -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", ["step_was_skipped", "get_skipped_steps", "get_scale", "state_dict", "pickle"]
)
def test_too_many_skips_in_a_row(read: str) -> None:
    """Too many skips in a row raise once, at any read, and again for another run of skips."""
    scaler = started(OURS, 64.0, max_consecutive_skips=3)

    def read_it() -> None:
        value = pickle.dumps(scaler) if read == "pickle" else getattr(scaler, read)
        if callable(value):
            value()

    run_steps(scaler, math.inf, math.inf, 1.0, math.inf, math.inf)
    read_it()
    for good in ([1.0], [], []):
        optimizer = sgd(leaf([math.inf, 1.0]))
        optimizer.param_groups[0]["param_names"] = ["head.weight"]
        finish(scaler, optimizer)
        text = r"last 3 steps have been skipped.*max_consecutive_skips=3(.|\n)*head\.weight: 1 inf"
        with pytest.raises(RuntimeError, match=text):
            read_it()
        read_it()
        run_steps(scaler, *good, math.inf, math.inf)


def test_a_loaded_state_starts_the_run_of_skips_again() -> None:
    """Training continues from a checkpoint after too many skips."""
    scaler = started(OURS, max_consecutive_skips=2)
    good = copy.deepcopy(scaler.state_dict())
    run_steps(scaler, math.inf, math.inf)
    with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
        scaler.get_scale()
    run_steps(scaler, math.inf)
    scaler.load_state_dict(good)
    run_steps(scaler, math.inf)
    assert scaler.get_scale() == good["scale"] / 2


def test_a_skip_before_a_new_scale_counts_in_a_row() -> None:
    """An update to a new scale without a step leaves the run of skips unchanged."""
    scaler = started(OURS, max_consecutive_skips=2)
    scaler.step(sgd(leaf(math.inf)))
    scaler.update(16.0)
    assert (scaler.step_was_skipped, scaler.get_skipped_steps()) == (True, 1)
    scaler.update(32.0)
    run_steps(scaler, math.inf)
    with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
        scaler.get_scale()


# ---- a limit of the norm -----------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_norm_above_the_limit_skips(unscale_first: bool, kind: str) -> None:
    """A norm above the limit skips the step, and the scale goes on as without an overflow."""
    scaler = started(OURS, growth_interval=2, skip_above_norm=5.0)
    seen = []
    for value, scale in ((20.0, 4.0), (20.5, 4.0), (math.inf, 8.0), (8.0, 4.0)):
        optimizer = KINDS[kind]([leaf([value])], lr=0.5)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        assert scaler.get_scale() == scale
        finish(scaler, optimizer)
        skipped = params(optimizer)[0].item() == 1.0
        seen.append((skipped, scaler.step_was_skipped, scaler.get_skipped_steps()))
    assert seen == [(False, False, 0), (True, True, 1), (True, True, 2), (False, False, 2)]


def test_skips_by_the_norm_count_in_a_row() -> None:
    scaler = started(OURS, 1.0, skip_above_norm=5.0, max_consecutive_skips=2)
    run_steps(scaler, 6.0, max_norm=1.0)
    assert scaler.step_was_skipped
    run_steps(scaler, 6.0, max_norm=1.0)
    with pytest.raises(
        RuntimeError, match=r"the last 2 steps have been skipped.* above skip_above_norm=5"
    ):
        scaler.get_skipped_steps()


# ---- a scale that stays ------------------------------------------------------------------------


@every_kind
def test_a_scale_that_is_not_dynamic(kind: str) -> None:
    scaler = started(OURS, 1.0, growth_interval=1, dynamic=False)
    for value, skipped in ((1.0, False), (math.nan, True), (1.0, False)):
        optimizer = KINDS[kind]([leaf([value], torch.bfloat16)], lr=0.5)
        with unwritten(grads(optimizer)):  # the factor is 1
            finish(scaler, optimizer)
        assert (scaler.step_was_skipped, scaler.get_scale()) == (skipped, 1.0)
        assert (params(optimizer)[0].item() == 1.0) == skipped
    assert scaler.get_skipped_steps() == 1
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
