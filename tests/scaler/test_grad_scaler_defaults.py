"""Test that defaults of dtype and device change nothing in the scaler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import amp_ext.optim
from amp_ext import verify
from twins import (
    DEVICES,
    KINDS,
    OURS,
    after_unscale,
    at_once,
    by_parameters,
    finish,
    leaf,
    params,
    plain,
    started,
)

OPTIONS: dict[str, Any] = {"hysteresis": 2, "max_consecutive_skips": 9, "skip_above_norm": 30.0}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def in_both(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Compare a function's result with its result under a default of float32."""
    before = torch.get_default_dtype()

    def compare(function: Callable[[], Any]) -> Any:
        expected = plain(function())
        torch.set_default_dtype(request.param)
        with torch.device("meta"):
            assert plain(function()) == expected
        return expected

    yield compare
    torch.set_default_dtype(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, at_once, after_unscale, by_parameters])
@pytest.mark.parametrize("kind", KINDS)
def test_steps(in_both: Any, kind: str, clip: Any, device: str) -> None:
    def train() -> Any:
        scaler, seen = started(OURS, growth_interval=2, device=device, **OPTIONS), []
        make = (
            partial(amp_ext.optim.AdamW, amsgrad=True) if kind == "amp_ext.optim" else KINDS[kind]
        )
        optimizer = make([leaf([1.0, 2.0], device=device)], lr=0.5)
        for value in (1.0, math.inf, 2.0**20, math.nan, math.inf, 3.0, 4.0):
            for param in params(optimizer):
                param.grad = torch.tensor([value, 2.0], dtype=torch.float32, device=device)
            norm = clip and clip(scaler, optimizer, 1.0)
            finish(scaler, optimizer)
            report, skipped = str(scaler.overflow_report()), scaler.step_was_skipped
            seen.append((norm, report, skipped, params(optimizer)[0].clone(), scaler.state_dict()))
        scaler.update(8.0)
        again = OURS(device)
        again.load_state_dict(scaler.state_dict())
        return [*seen, optimizer.state_dict(), scaler.get_scale(), again.state_dict()]

    assert in_both(train)[4][1].startswith("1 of 1 gradients are not finite")


def test_cases_of_verification(in_both: Any) -> None:
    def arguments() -> Any:
        families = ("update_scale", "grad_norm", "adam", "sgd", "gemm_f16")
        cases = [verify.cases(family, "cuda", torch.device("cpu")) for family in families]
        return [[case.arguments for case in itertools.islice(some, 12)] for some in cases]

    in_both(arguments)
