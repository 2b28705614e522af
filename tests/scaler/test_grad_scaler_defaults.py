"""Test that defaults of dtype and device change nothing in the scaler."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import amp_ext.optim
import twins
from amp_ext import verify
from twins import DEVICES, KINDS, OURS, finish, leaf, params, plain, started

MAKERS = KINDS | {"amp_ext.optim": partial(amp_ext.optim.AdamW, amsgrad=True)}


def same_for_every_default(function: Callable[[], Any]) -> Any:
    """Return a result in bits; assert that defaults leave it as it is."""
    before, expected = torch.get_default_dtype(), plain(function())
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                assert plain(function()) == expected
        finally:
            torch.set_default_dtype(before)
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, twins.at_once, twins.after_unscale, twins.by_parameters])
@pytest.mark.parametrize("kind", MAKERS)
def test_steps(kind: str, clip: Any, device: str) -> None:
    options = {"hysteresis": 2, "max_consecutive_skips": 9, "skip_above_norm": 30.0}

    def train() -> Any:
        scaler, seen = started(OURS, growth_interval=2, device=device, **options), []
        optimizer = MAKERS[kind]([leaf([1.0, 2.0], device=device)], lr=0.5)
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

    assert same_for_every_default(train)[4][1].startswith("1 of 1 gradients are not finite")


def test_cases_of_verification() -> None:
    def arguments() -> Any:
        families = ("update_scale", "grad_norm", "adam", "sgd", "gemm_f16")
        cases = [verify.cases(family, "cuda", torch.device("cpu")) for family in families]
        return [[case.arguments for case in itertools.islice(some, 12)] for some in cases]

    same_for_every_default(arguments)
