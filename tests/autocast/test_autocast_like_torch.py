"""Test that routed products have the views, strides and hooks of torch's products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_ext

FP16 = torch.float16
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
REGIONS = (torch.autocast, amp_ext.autocast)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "conv2d channels_last": (lambda x, w: F.conv2d(last(x), w), (2, 3, 4, 4), (5, 3, 1, 1)),
    "conv2d": (F.conv2d, (2, 3, 4, 4), (5, 3, 1, 1)),
    "matmul 1-D 2-D": (torch.matmul, (3,), (3, 5)),
    "matmul 2-D 1-D": (torch.matmul, (4, 3), (3,)),
    "linear 1-D": (F.linear, (3,), (5, 3)),
}


def relu_after_a_checkpoint(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda _: run(), x, use_reentrant=True).relu_()


def detach_in_place(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    return run().detach_() + x.sum()


def add_after_no_grad(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        result = run()
    return result.add_(x.sum())


@pytest.mark.parametrize("change", [relu_after_a_checkpoint, detach_in_place, add_after_no_grad])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_may_change_in_place(name: str, change: Any) -> None:
    """A change in place has torch's result and gradient."""
    product, x_shape, w_shape = PRODUCTS[name]
    values, weight = (torch.randint(-2, 3, shape).float() for shape in (x_shape, w_shape))
    outcomes = []
    for region in REGIONS:
        x = values.clone().requires_grad_()
        with region("cpu", FP16):
            result = change(functools.partial(product, x, weight), x)
        result.float().sum().backward()
        outcomes.append([result, x.grad])
    for theirs, ours in zip(*outcomes, strict=True):
        assert torch.equal(theirs, ours)


def layout(tensor: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides.

    torch's convolutions by FP16 instructions give dimensions of one element strides of their own.
    """
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in dims if size != 1 or not amp_ext._C.multiplies(FP16)]


@pytest.mark.parametrize("unbatched", [False, True], ids=["batched", "unbatched"])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 4, 1)], ids=str)
@pytest.mark.parametrize("filters", [6, 1])
def test_strides_of_convolutions(filters: int, sizes: tuple[int, ...], unbatched: bool) -> None:
    """The result and all gradients have exactly torch's strides."""
    for x_format, w_format, has_bias in itertools.product(*2 * [FORMATS.values()], [True, False]):
        strides = []
        for region in REGIONS:
            x = torch.randn(sizes).contiguous(memory_format=x_format)
            x = (x[0] if unbatched else x).detach().requires_grad_()
            weight = torch.randn(filters, 3, 1, 1).to(memory_format=w_format).requires_grad_()
            bias = torch.randn(filters, requires_grad=True) if has_bias else None
            with region("cpu", FP16):
                result = F.conv2d(x, weight, bias)
            result.float().square().sum().backward()
            leaves = [leaf.grad for leaf in (x, weight, bias) if leaf is not None]
            strides.append([layout(tensor) for tensor in (result, *leaves)])
        assert strides[0] == strides[1], (x_format, w_format, has_bias)


LAYERS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "addmm": (torch.addmm, [(5,), (4, 3), (3, 5)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 5), (2, 4, 3), (2, 3, 5)]),
    "linear": (F.linear, [(4, 3), (5, 3), (5,)]),
    "conv2d": (F.conv2d, [(2, 3, 4, 5), (6, 3, 1, 1), (6,)]),
    "conv2d unbatched": (F.conv2d, [(3, 4, 5), (6, 3, 1, 1), (6,)]),
    "conv2d channels_last": (
        lambda x, w, b: F.conv2d(last(x), w, b),
        [(2, 3, 4, 5), (6, 3, 1, 1), (6,)],
    ),
}


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_order_of_hooks(name: str, uses: int) -> None:
    """Hooks of an op's arguments fire in torch's order."""
    run, shapes = LAYERS[name]
    orders: list[list[int]] = []
    for region in REGIONS:
        leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
        orders.append([])
        for i, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, i=i: orders[-1].append(i))
        with region("cpu", FP16):
            loss = sum(run(*leaves).float().sum() for _ in range(uses))
        loss.backward()
    assert orders[0] == orders[1]
