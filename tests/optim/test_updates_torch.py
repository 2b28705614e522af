"""Test adam_ and sgd_ against the optimizers of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executors import Executor, every_executor
from optim_cases import OPTIONS, Values

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


ADAMS: list[Values] = [
    {"decoupled": False, "weight_decay": 0.0},
    {"decoupled": False},
    {"decoupled": True},
    {"decoupled": True, "maximize": True},
    {"decoupled": False, "amsgrad": True},
    {"decoupled": True, "beta1": 0.0, "eps": 1e-3},
]
SGDS: list[Values] = [
    {"momentum": 0.0},
    {},
    {"dampening": 0.4},
    {"nesterov": True, "maximize": True},
    {"weight_decay": 0.0, "dampening": 0.4},
]


def adam_of_torch(params: list[Tensor], options: Values) -> torch.optim.Optimizer:
    """Return torch's optimizer for the options of adam_."""
    given = {name: value for name, value in options.items() if name[:4] not in ("beta", "deco")}
    kind = torch.optim.AdamW if options["decoupled"] else torch.optim.Adam
    return kind(params, betas=(options["beta1"], options["beta2"]), foreach=False, **given)


@every_executor
@pytest.mark.parametrize(
    ("op", "options"),
    [*(("adam_", options) for options in ADAMS), *(("sgd_", options) for options in SGDS)],
    ids=str,
)
def test_equals_torch(executor: Executor, op: str, options: Values) -> None:
    """Several steps from the start equal torch's in float64.

    SGD's first buffer is the gradient, also with a dampening.
    """
    params = [torch.randn(shape).to(executor.device) for shape in ((300,), (5, 3), ())]
    theirs = [p.double().requires_grad_() for p in params]
    options = {**OPTIONS[op], **options}
    state: Values = {"steps": [executor.scalar(0.0) for _ in params]}
    if op == "adam_":
        optimizer, ratio = adam_of_torch(theirs, options), 2.0
        names = ["exp_avgs", "exp_avg_sqs"] + ["max_exp_avg_sqs"] * options.pop("amsgrad", False)
        state |= {name: [torch.zeros_like(p) for p in params] for name in names}
    else:
        options["lr"], ratio = 2.0**-10, 2 * 2.0**11 * STEPS  # the largest buffer, twice
        optimizer = torch.optim.SGD(theirs, **options, foreach=False)
        unset = torch.nan if options["dampening"] else 0.0
        buffers = [torch.full_like(p, unset) for p in params]
        state["momentum_buffers"] = buffers if options["momentum"] else None
        state["steps"] = state["steps"] if options["dampening"] else None
    for _ in range(STEPS):
        grads = gradients(params)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        getattr(executor.ops, op)(params, grads, **state, **options)
    assert state["steps"] is None or [step.item() for step in state["steps"]] == [STEPS] * 3
    assert_near(params, theirs, options["lr"], ratio)
