"""Test the results of a step: torch's numbers, masters, dtypes of moments, skips, scalars."""

import math
from typing import Any

import pytest
import torch

import optim_cases
from amp_ext import optim
from amp_ext.optim._step import StepScalars
from executors import Executor, against_oracle
from optim_cases import LR, assert_same_bits, bits, make, params, params_of, set_grads, train


@against_oracle
@pytest.mark.parametrize("case", optim_cases.OPTIMIZERS)
def test_as_torch(executor: Executor, case: str) -> None:
    """Parameters, moments and counts equal torch's.

    One parameter has a gradient in every other step only.
    """
    ours, torchs = (make(module, case, executor.device) for module in (optim, torch.optim))
    assert ours._why_not() is None
    for optimizer in (ours, torchs):
        for i in range(5):
            set_grads(params(optimizer), i)
            if i % 2 == 0:
                params(optimizer)[0].grad = None
            optimizer.step()
    optim_cases.assert_close(params(ours), params(torchs), optim_cases.tolerance(5, LR))
    for mine, other in zip(params(ours), params(torchs), strict=True):
        state, expected = dict(ours.state[mine]), torchs.state[other]
        if case == "dampening":
            assert state.pop("step") == (2 if mine is params(ours)[0] else 5)
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            # Squares are below 9, with weight decay. Torch's steps are on the CPU.
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=9 * 28 * 2**-24, check_device=False
            )


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_is_torchs(name: str) -> None:
    ours, torchs = (getattr(module, name)(params_of(), lr=LR) for module in (optim, torch.optim))
    assert isinstance(ours, getattr(torch.optim, name))
    assert repr(ours) == repr(torchs)
    assert ours.defaults == torchs.defaults
    fused = getattr(optim, name)(params_of(), fused=True)
    assert not hasattr(fused, "_step_supports_amp_scaling")


def skip(optimizer: Any) -> None:
    set_grads(params(optimizer), 7, scale=math.inf)
    found_inf = torch.ones((), device=params(optimizer)[0].device)
    optimizer._step_scalars = StepScalars(found_inf)
    optimizer.step()
    del optimizer._step_scalars


@against_oracle
def test_a_skip_changes_nothing(executor: Executor) -> None:
    """Skipping the first step of all, or a later one, is as never making it."""
    for case in optim_cases.OPTIMIZERS:
        optimizer, never = (make(optim, case, executor.device) for _ in range(2))
        skip(optimizer)
        for each in (optimizer, never):
            train(each, range(1))
        skip(optimizer)
        assert_same_bits(bits(optimizer), bits(never))


@against_oracle
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["adamw", "amsgrad", "momentum"])
def test_master_weights(executor: Executor, case: str, dtype: torch.dtype) -> None:
    """Masters equal float32 parameters, and parameters are their roundings."""
    halves = make(optim, case, executor.device, dtype, master_weights=True)
    wide = make(optim, case, executor.device)
    for param, half in zip(params(wide), params(halves), strict=True):
        param.data = half.detach().float()
    for i in range(4):
        set_grads(params(halves), i)
        for param, half in zip(params(wide), params(halves), strict=True):
            param.grad = half.grad.float()
        halves.step()
        wide.step()
    for param, half in zip(params(wide), params(halves), strict=True):
        assert_same_bits(halves.state[half].pop("master_param"), param.detach())
        assert_same_bits(half.detach(), param.detach().to(dtype))
        assert_same_bits(dict(halves.state[half]), dict(wide.state[param]))


def test_masters_follow_what_others_write() -> None:
    """Masters follow writes to a weight, with or without a new version, and otherwise stay."""
    optimizer = optim.SGD(params_of(dtype=torch.bfloat16), lr=2**-12, master_weights=True)
    train(optimizer, range(1))
    first, second, *_ = params(optimizer)
    masters = [optimizer.state[param]["master_param"].clone() for param in (first, second)]
    first.data[0, 0] = 3.0
    second.data = torch.full_like(second, -3.0)
    set_grads(params(optimizer), 1, scale=0.0)
    optimizer.step()
    masters[0][0, 0], masters[1][:] = 3.0, -3.0
    for param, master in zip((first, second), masters, strict=True):
        assert_same_bits(optimizer.state[param]["master_param"], master)


def test_dtypes_of_moments() -> None:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    options = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    optimizer = make(optim, "amsgrad", **options)
    train(optimizer, range(1))
    for state in optimizer.state.values():
        assert {name: state[name].dtype for name in names} == dict.fromkeys(names, torch.bfloat16)
    with pytest.raises(ValueError, match=r"exp_avg_dtype must be torch.float32, torch.bfloat16"):
        optim.Adam(params_of(), exp_avg_dtype=torch.float64)
