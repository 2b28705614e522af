"""Test GradScaler beyond torch: its options, its skip counter, and deliberate differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import reference
from cases import assert_same
from twins import (
    OURS,
    grads,
    leaf,
    params,
    sgd,
    started,
)


def take_steps(scaler: Any, values: list[float]) -> list[float]:
    """Step once per gradient value, and return the scale after each update."""
    scales = []
    for value in values:
        scaler.step(sgd(leaf(value)))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [3.0])
def test_16_bit_gradients(dtype: torch.dtype, scale: float) -> None:
    """bf16 gradients are unscaled as by the oracle, and fp16 ones if the option allows them."""
    grad = torch.randn(1000).mul(100).to(dtype)
    expected = grad.clone()
    inv_scale = torch.tensor(scale).double().reciprocal().float()
    reference.unscale_([expected], torch.tensor(0.0), inv_scale)

    optimizer = sgd(leaf(grad, dtype))
    scaler = started(OURS, scale, allow_fp16_grads=dtype is torch.float16)
    scaler.unscale_(optimizer)
    assert_same(grads(optimizer)[0], expected)
    scaler.step(optimizer)
    scaler.update()
    assert_same(params(optimizer)[0], torch.ones(1000, dtype=dtype) - expected * 0.5)


def test_fp16_gradients_overflow_as_others_do() -> None:
    scaler = started(OURS, allow_fp16_grads=True, growth_interval=1)
    for value, scale in ((math.inf, 2.0), (65504.0, 4.0)):
        optimizer = sgd(leaf([1.0, value], torch.float16))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_optimizer_without_gradients_is_accepted_when_allowed(fused: bool) -> None:
    """A step without gradients counts as one without overflow, alone or beside another."""
    scaler = started(OURS, allow_no_grads=True, growth_interval=1)
    idle = torch.optim.Adam([torch.ones(2)], fused=fused)
    scaler.unscale_(idle)
    scaler.step(idle)
    scaler.update()
    assert (scaler.get_scale(), scaler.step_was_skipped) == (8.0, False)

    busy = sgd(leaf(math.inf))
    scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    assert (scaler.get_scale(), scaler.step_was_skipped) == (4.0, True)


@pytest.mark.parametrize(
    ("options", "values", "scales"),
    [
        ({"min_scale": 1.5}, [math.inf] * 3, [2.0, 1.5, 1.5]),
        ({"max_scale": 10.0, "growth_interval": 1}, [1.0] * 3, [8.0, 10.0, 10.0]),
        ({"hysteresis": 2}, [math.inf, 1.0, math.inf, math.nan, math.inf], [4, 4, 4, 2, 1]),
        ({"hysteresis": 1}, [math.inf, 1.0, math.inf], [2.0, 2.0, 1.0]),
    ],
    ids=str,
)
def test_scale_options(options: dict[str, Any], values: list[float], scales: list[float]) -> None:
    assert take_steps(started(OURS, **options), values) == scales


def test_scale_never_decays_to_zero() -> None:
    """The scale never decays to 0: below the floor, zero gradients would become NaN."""
    scaler = started(OURS, 2.0**-100)
    assert take_steps(scaler, [math.inf] * 60)[-1] == 2.0**-126
    optimizer = sgd(leaf([0.0, 1.0]))
    scaler.unscale_(optimizer)
    assert grads(optimizer)[0].isfinite().all()


def test_scale_grows_after_the_interval_has_been_lowered() -> None:
    scaler = started(OURS)
    take_steps(scaler, [1.0] * 5)
    scaler.set_growth_interval(3)
    assert take_steps(scaler, [1.0] * 4) == [8.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_scale": -1.0}, "min_scale must be .* got -1.0"),
        ({"min_scale": math.nan}, "min_scale must be .* got nan"),
        ({"min_scale": math.inf}, "min_scale must be .* got inf"),
        ({"max_scale": 0.0}, "max_scale must be .* got 0.0"),
        ({"max_scale": -2.0}, "max_scale must be .* got -2.0"),
        ({"max_scale": math.nan}, "max_scale must be .* got nan"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale must be .*max_scale, got 8.0 and 4.0"),
        ({"hysteresis": 0}, "hysteresis must be .* got 0"),
        ({"hysteresis": -3}, "hysteresis must be .* got -3"),
        ({"hysteresis": 1.5}, "hysteresis must be .* got 1.5"),
        ({"hysteresis": 2**31}, "hysteresis must be .* got 2147483648"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"GradScaler.*{text}"):
        OURS("cpu", **options)


@pytest.mark.parametrize("integer", [np.int64, torch.tensor], ids=["NumPy", "tensor"])
def test_integers_of_other_libraries(integer: Callable[[int], Any]) -> None:
    options = {"growth_interval": integer(2), "hysteresis": integer(2)}
    scaler = started(OURS, **options, max_consecutive_skips=integer(3))
    assert take_steps(scaler, [1.0, 1.0, math.inf, math.inf]) == [4.0, 8.0, 8.0, 4.0]


def test_the_first_scale_in_inference_mode() -> None:
    """Training continues after an evaluation that scales a loss first."""
    scaler = OURS("cpu", init_scale=4.0, growth_interval=2, hysteresis=2, max_consecutive_skips=3)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())).item() == 4.0
    assert take_steps(scaler, [1.0, 1.0, math.inf, math.inf]) == [4.0, 8.0, 8.0, 4.0]
    assert scaler.get_skipped_steps() == 2


def test_skipped_steps_are_counted() -> None:
    scaler = OURS("cpu", init_scale=4.0)
    assert (scaler.get_skipped_steps(), scaler.step_was_skipped) == (0, False)
    scaler.scale(torch.ones(()))
    seen = []
    for value in (1.0, math.inf, math.nan, 1.0):
        take_steps(scaler, [value])
        seen.append((scaler.step_was_skipped, scaler.get_skipped_steps()))
    assert seen == [(False, 0), (True, 1), (True, 2), (False, 2)]


def test_skipped_step_counts_with_a_new_scale_too() -> None:
    scaler = started(OURS)
    scaler.step(sgd(leaf(math.inf)))
    scaler.update(16.0)
    assert (scaler.step_was_skipped, scaler.get_skipped_steps()) == (True, 1)


def test_disabled_scaler_skips_nothing() -> None:
    scaler = OURS("cpu", enabled=False)
    take_steps(scaler, [math.inf])
    assert (scaler.step_was_skipped, scaler.get_skipped_steps()) == (False, 0)
