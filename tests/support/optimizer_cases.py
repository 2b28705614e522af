"""Parameters and gradients for optimizer steps, and the tolerance between implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SHAPES = ((5, 3), (7,), (), (2, 3, 4), (0,), (1025,))


def params_of(
    shapes: Iterable[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[torch.nn.Parameter]:
    """Return parameters of magnitudes from 1/2 to 2, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(_numbers(shape, generator).to(device, dtype)) for shape in shapes]


def set_grads(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    """Set gradients of magnitudes from 1/2 to 2, times the scale."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (_numbers(param.shape, generator) * scale).to(param)


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    sizes = torch.rand(shape, generator=generator) * 1.5 + 0.5
    return sizes * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def train(
    optimizer: Optimizer,
    steps: Iterable[int],
    before_step: Callable[[int], Any] = lambda i: None,
) -> None:
    """Step once for each number; a number determines the gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i in steps:
        set_grads(params, i)
        before_step(i)
        optimizer.step()


def tolerance(steps: int, lr: float) -> float:
    """Return the bound of float32 parameters' differences after some steps of two implementations.

    Let u = 2**-24. An update rounds |param| < 4 twice, in each of both implementations. Moments and
    corrections of step n have seen less than 4n + 8 roundings, relative to gradients of at most 3
    (with weight decay). The root of a second moment of at least 1/3 divides them: the update's
    error is below lr * 9 * (4n + 8) * u. SGD's divisor is 1.
    """
    u = 2.0**-24
    return 2 * sum(2 * 4 * u + lr * 9 * (4 * n + 8) * u for n in range(1, steps + 1))


def assert_close(ours: Sequence[Tensor], torchs: Sequence[Tensor], most: float) -> None:
    for mine, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=most)


def bits(optimizer: Optimizer) -> list[Any]:
    """Return copies of all tensors that a step writes."""
    return [
        (
            param.detach().clone(),
            {name: value.clone() for name, value in optimizer.state[param].items()},
        )
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state
    ] + [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


def assert_same_bits(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
