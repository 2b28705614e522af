"""Test GradScaler's errors: torch's types and texts, and no partial change."""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twins import (
    OURS,
    THEIRS,
    ScalerClass,
    leaf,
    outcome,
    raises_as_torch,
    same_outcome,
    sgd,
    sparse_leaf,
    started,
    state_of,
)

Script = Callable[[ScalerClass], Any]


def in_order(*calls: str, **options: Any) -> Script:
    """Return a script that calls methods by name on a started scaler, with one optimizer."""

    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = started(scaler_class, **options), sgd(leaf([4.0]))
        for call in calls:
            getattr(scaler, call)(*(() if call == "update" else (optimizer,)))
        return state_of(scaler, [optimizer])

    return script


def unscaling(params: Any) -> Script:
    """Return a script that unscales an optimizer-like object with these parameters."""

    def script(scaler_class: ScalerClass) -> Any:
        optimizer = type("Any", (), {"param_groups": [{"params": params}]})()
        return started(scaler_class).unscale_(optimizer)

    return script


SAID_TWICE = "unscale_() has already been called on this optimizer since the last update()."
NOT_SCALED = "This may indicate your script did not use scaler.scale(loss or outputs) earlier"
ERRORS: dict[str, tuple[Script, type[Exception], str]] = {
    "unscale_ twice": (in_order("unscale_", "unscale_"), RuntimeError, SAID_TWICE),
    "unscale_ after step": (
        in_order("step", "unscale_"),
        RuntimeError,
        "unscale_() is being called after step().",
    ),
    "step twice": (
        in_order("unscale_", "step", "step"),
        RuntimeError,
        "step() has already been called since the last update().",
    ),
    "update without step": (
        in_order("update"),
        AssertionError,
        "No inf checks were recorded prior to update.",
    ),
    "update twice": (in_order("step", "update", "update"), AssertionError, "No inf checks"),
    "unscale_ without scale": (
        lambda s: s("cpu").unscale_(sgd(leaf(1.0))),
        AssertionError,
        "Attempted unscale_ but _scale is None.  " + NOT_SCALED,
    ),
    "step without scale": (
        lambda s: s("cpu").step(sgd(leaf(1.0))),
        AssertionError,
        "Attempted step but _scale is None.  " + NOT_SCALED,
    ),
    "fused step without scale": (
        lambda s: s("cpu").step(torch.optim.Adam([leaf(1.0)], fused=True)),
        AssertionError,
        "Attempted step but _scale is None.  " + NOT_SCALED,
    ),
    "update without scale": (
        lambda s: s("cpu").update(),
        AssertionError,
        "Attempted update but _scale is None.  " + NOT_SCALED,
    ),
    "new scale without scale": (
        lambda s: s("cpu").update(2.0),
        AssertionError,
        "Attempted update but _scale is None.  " + NOT_SCALED,
    ),
    "_check_inf_per_device without scale": (
        lambda s: s("cpu")._check_inf_per_device(sgd(leaf(1.0))),
        AssertionError,
        "Attempted _check_inf_per_device but _scale is None.  " + NOT_SCALED,
    ),
    "closure by keyword": (
        lambda s: started(s).step(sgd(leaf(1.0)), closure=lambda: 0.0),
        RuntimeError,
        "Closure use is not currently supported if GradScaler is enabled.",
    ),
    "closure by keyword to a fused step": (
        lambda s: started(s).step(torch.optim.Adam([leaf(1.0)], fused=True), closure=None),
        RuntimeError,
        "Closure use is not currently supported if GradScaler is enabled.",
    ),
    "no gradients": (
        lambda s: started(s).step(sgd(torch.ones(2))),
        AssertionError,
        "No inf checks were recorded for this optimizer.",
    ),
    "fp16 gradients": (
        lambda s: started(s).unscale_(sgd(leaf(1.0, torch.float16))),
        ValueError,
        "Attempting to unscale FP16 gradients.",
    ),
    "fp16 sparse gradients": (
        lambda s: started(s).unscale_(sgd(sparse_leaf(torch.float16))),
        ValueError,
        "Attempting to unscale FP16 gradients.",
    ),
    "a number for a parameter": (unscaling([3]), AssertionError, "torch.Tensor, got int"),
    "a deque for a parameter": (
        unscaling([leaf(1.0), collections.deque()]),
        AssertionError,
        "expected param to be torch.Tensor, got deque",
    ),
    "parameter group without parameters": (
        lambda s: started(s).unscale_(type("Any", (), {"param_groups": [{}]})()),
        KeyError,
        "params",
    ),
    "growth_factor of 1": (
        lambda s: s("cpu", growth_factor=1.0),
        AssertionError,
        "The growth factor must be > 1.0.",
    ),
    "backoff_factor of 1": (
        lambda s: s("cpu", backoff_factor=1.0),
        AssertionError,
        "The backoff factor must be < 1.0.",
    ),
    "scale of a number": (
        lambda s: s("cpu").scale(3.0),
        ValueError,
        "outputs must be a Tensor or an iterable of Tensors",
    ),
    "scale of a list with a number": (
        lambda s: s("cpu").scale([torch.ones(()), 3]),
        ValueError,
        "outputs must be a Tensor or an iterable of Tensors",
    ),
    "second initialisation": (
        lambda s: started(s)._lazy_init_scale_growth_tracker("cpu"),
        AssertionError,
        "_growth_tracker initialized before _scale",
    ),
}


@pytest.mark.parametrize(("script", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_raises_as_torch(script: Script, error: type[Exception], text: str) -> None:
    raises_as_torch(script, error, text)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),
        lambda: torch.ones((), requires_grad=True),
        lambda: torch.ones((), device="meta"),
        lambda: 2,
        lambda: "2",
        lambda: torch.ones(1),
    ],
    ids=["two-elements", "requires-grad", "other-device", "int", "str", "shape-(1,)"],
)
def test_bad_new_scale(make: Callable[[], Any]) -> None:
    """A bad new scale is torch's error, and the step can still be closed afterwards."""

    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = started(scaler_class), sgd(leaf(math.inf))
        scaler.step(optimizer)
        error = outcome(lambda: scaler.update(make()))
        assert error[0] == "raised"
        before = state_of(scaler, [optimizer])
        scaler.update()
        return error, before, scaler.get_scale()

    _, (_, _, scale) = same_outcome(script)
    assert scale == 2.0


@pytest.mark.parametrize("enabled", [True, False])
def test_cuda_scaler_without_cuda_warns_and_disables_itself(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA scaler without CUDA gives torch's warning and disables itself."""
    monkeypatch.setattr(
        torch.cuda.amp.common, "amp_definitely_not_available", lambda: True, raising=True
    )
    seen = []
    for scaler_class in (THEIRS, OURS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler = scaler_class("cuda", enabled=enabled)
        assert not scaler.is_enabled()
        assert scaler.scale(3.0) == 3.0
        seen.append([(w.category, str(w.message)) for w in caught])
    assert seen[1] == seen[0]
    assert len(seen[0]) == int(enabled)
