"""Test adam_ and sgd_ against the optimizers of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from executors import Executor, every_executor
from optim_cases import ADAM, SGD

STEPS = 6
UNIT = 2.0**-24


def gradients(params: list[Tensor]) -> list[Tensor]:
    """Return gradients from 2**-10 to 2**10, the same magnitude for an element in each step."""
    generator = torch.Generator().manual_seed(1)
    grads = []
    for param in params:
        magnitude = (20 * torch.rand(param.shape, generator=generator) - 10).exp2()
        grads.append((magnitude * (1 + torch.rand(param.shape))).to(param.device))
    return grads


def assert_near(actual: list[Tensor], expected: list[Tensor], lr: float, ratio: float) -> None:
    """Assert that parameters are right up to the rounding errors of all steps.

    A step rounds its parameter twice, decay included, and the subtrahend, up to lr * ratio, a dozen
    times at most. Moments carry three roundings for each step so far. They are sums of terms of one
    sign here (except the weight decay's). Their error relative to the ratio is therefore 3 * STEPS
    units at most, half of that for the second moment's root.
    """
    for one, other in zip(actual, expected, strict=True):
        units = 3 * other.abs() + lr * ratio * (12 + 5 * STEPS)
        off = (one.double() - other).abs()
        assert (off <= STEPS * UNIT * units).all(), (off / units / UNIT).max()


@every_executor
@pytest.mark.parametrize(
    "options",
    [
        {"decoupled": False, "weight_decay": 0.0},
        {"decoupled": False},
        {"decoupled": True},
        {"decoupled": True, "maximize": True},
        {"decoupled": False, "amsgrad": True},
        {"decoupled": True, "beta1": 0.0, "eps": 1e-3},
    ],
    ids=str,
)
def test_adam(executor: Executor, options: dict[str, Any]) -> None:
    """Several steps from the start equal torch's Adam in float64."""
    params = [torch.randn(shape).to(executor.device) for shape in ((300,), (5, 3), ())]
    theirs = [p.double().requires_grad_() for p in params]
    settings = {**ADAM, **options}
    amsgrad = settings.pop("amsgrad", False)
    optimizer = (torch.optim.AdamW if settings["decoupled"] else torch.optim.Adam)(
        theirs,
        lr=settings["lr"],
        betas=(settings["beta1"], settings["beta2"]),
        **{name: settings[name] for name in ("eps", "weight_decay")},
        maximize=settings.get("maximize", False),
        amsgrad=amsgrad,
        foreach=False,
    )
    state = {
        name: [torch.zeros_like(p) for p in params]
        for name in ("exp_avgs", "exp_avg_sqs", *(["max_exp_avg_sqs"] if amsgrad else []))
    }
    steps = [executor.scalar(0.0) for _ in params]
    for _ in range(STEPS):
        grads = gradients(params)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        executor.ops.adam_(params, grads, steps=steps, **state, **settings)
    assert [step.item() for step in steps] == [STEPS] * 3
    assert_near(params, theirs, settings["lr"], ratio=2.0)


@every_executor
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {},
        {"dampening": 0.4},
        {"nesterov": True, "maximize": True},
        {"weight_decay": 0.0, "dampening": 0.4},
    ],
    ids=str,
)
def test_sgd(executor: Executor, options: dict[str, Any]) -> None:
    """Several steps equal torch's SGD; the first buffer is the gradient, also with a dampening."""
    params = [torch.randn(shape).to(executor.device) for shape in ((300,), (5, 3), ())]
    theirs = [p.double().requires_grad_() for p in params]
    settings = {**SGD, **options, "lr": 2.0**-10}
    optimizer = torch.optim.SGD(theirs, **settings, foreach=False)
    momentum, dampening = settings["momentum"], settings["dampening"]
    unset = torch.nan if dampening else 0.0
    buffers = [torch.full_like(p, unset) for p in params] if momentum else None
    steps = [executor.scalar(0.0) for _ in params] if dampening else None
    for _ in range(STEPS):
        grads = gradients(params)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        executor.ops.sgd_(params, grads, buffers, steps, **settings)
    largest = 2.0**11 * STEPS  # of a buffer
    assert_near(params, theirs, settings["lr"], ratio=2 * largest)
