"""Test options of the optimizers as NumPy scalars and as tensors of no dimensions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from amp_ext import optim

# Numbers that all kinds hold exactly.
ADAM: dict[str, Any] = {
    **{"lr": 0.125, "betas": (0.5, 0.75), "eps": 2.0**-20, "weight_decay": 0.25},
    **{"amsgrad": True, "maximize": True},
}
SGD = {"lr": 0.125, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.25, "maximize": True}
OPTIONS: dict[str, dict[str, Any]] = {"Adam": ADAM, "AdamW": ADAM, "SGD": SGD}
KINDS: dict[str, Callable[[float], Any]] = {
    "float16": np.float16,
    "tensor": lambda value: torch.tensor(value, dtype=torch.float64),
}


def trained(name: str, options: dict[str, Any], **storage: Any) -> Tensor:
    """Return the parameter after some steps, each with these options."""
    param = torch.linspace(-1.0, 1.0, 7, dtype=torch.float32)
    optimizer = getattr(optim, name)([param], **OPTIONS[name], **storage)
    for step in range(3):
        optimizer.param_groups[0].update(options)  # as a warm-up does
        param.grad = torch.arange(7, dtype=torch.float32) - step
        optimizer.step()
    return param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_numbers(name: str, kind: str) -> None:
    """Each option changes a step as the same number of Python does, also beyond torch's options."""
    expected, make = trained(name, {}), KINDS[kind]
    every = tree_map_only(float, make, tree_map_only(bool, np.bool_, OPTIONS[name]))
    for option, value in every.items():
        torch.testing.assert_close(trained(name, {option: value}), expected)
    if "tensor" not in kind:
        expected = trained(name, {}, stochastic_rounding=True)
        assert torch.equal(trained(name, every, stochastic_rounding=True), expected)


def test_a_warm_up_from_no_momentum() -> None:
    """The momentum of a warm-up by np.interp starts at 0."""

    def run(module: Any) -> Tensor:
        param = torch.ones(3)
        optimizer = module.SGD([param], lr=np.float64(0.1), momentum=np.float64(0.9))
        for step in range(6):
            optimizer.param_groups[0]["lr"] = np.interp(step, [0, 4], [0.0, 0.1])
            optimizer.param_groups[0]["momentum"] = np.interp(step, [0, 4], [0.0, 0.9])
            param.grad = torch.full((3,), 1.0 + step)
            optimizer.step()
        return param

    torch.testing.assert_close(run(optim), run(torch.optim))
