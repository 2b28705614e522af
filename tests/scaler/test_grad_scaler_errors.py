"""Test GradScaler's errors: torch's types and texts, and no partial change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twins import (
    OURS,
    ScalerClass,
    leaf,
    outcome,
    same_outcome,
    sgd,
    started,
    state_of,
)

Script = Callable[[ScalerClass], Any]


# test_grad_scaler_machine.py has the errors of an order of calls.
ERRORS: dict[str, Script] = {
    "check without scale": lambda s: s("cpu")._check_inf_per_device(sgd(leaf(1.0))),
    "closure by keyword": lambda s: started(s).step(sgd(leaf(1.0)), closure=lambda: 0.0),
    "no parameters": lambda s: started(s).unscale_(type("Any", (), {"param_groups": [{}]})()),
    "second initialisation": lambda s: started(s)._lazy_init_scale_growth_tracker("cpu"),
}


@pytest.mark.parametrize("script", ERRORS.values(), ids=ERRORS)
def test_raises_as_torch(script: Script) -> None:
    outcome, error, *_ = same_outcome(script)
    assert outcome == "raised"
    assert error in (AssertionError, KeyError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize(
    ("param", "helps"),
    [
        (
            lambda: leaf(1.0, torch.float16),
            ["FP32 weights under autocast", "master_weights=True", "allow_fp16_grads=True"],
        ),
        (lambda: torch.ones(2), ["other parameters", "zero_grad()", "allow_no_grads=True"]),
    ],
    ids=["fp16", "no gradients"],
)
def test_errors_name_what_helps(param: Callable[[], Any], helps: list[str]) -> None:
    with pytest.raises((ValueError, AssertionError)) as raised:
        started(OURS).step(sgd(param()))
    assert [text for text in helps if text in str(raised.value)] == helps


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), device="meta"), 2], ids=str)
def test_bad_new_scale(value: Any) -> None:
    """A bad new scale is torch's error, and the step can still be closed afterwards."""

    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = started(scaler_class), sgd(leaf(math.inf))
        scaler.step(optimizer)
        error = outcome(lambda: scaler.update(value))
        before = state_of(scaler, [optimizer])
        scaler.update()
        return error, before, scaler.get_scale()

    _, (error, _, scale) = same_outcome(script)
    assert (error[0], scale) == ("raised", 2.0)
