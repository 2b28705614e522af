"""Copies of weights that an optimizer provides take the place of casts while they are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import amp_ext
from amp_ext import _C
from autocast_cases import Seen


@pytest.fixture
def weight() -> Tensor:
    return torch.randint(-3, 4, (4, 4)).float().requires_grad_()


def provide(weight: Tensor) -> Tensor:
    copy = weight.detach().half()
    _C.provide_copies([weight], [copy])
    return copy


def casts(weight: Tensor, dtype: torch.dtype = torch.float16) -> int:
    """How many casts a product takes, which is right."""
    x = torch.eye(4).to(dtype)
    with amp_ext.autocast("cpu", dtype=dtype), Seen() as seen:
        product = x @ weight
    assert product.equal(weight.to(dtype))
    return seen.casts


def test_used(weight: Tensor) -> None:
    copy = provide(weight)
    assert casts(weight) == 0
    assert casts(weight) == 0  # in another region too
    with torch.no_grad():
        assert casts(weight) == 0
    with amp_ext.autocast("cpu", dtype=torch.float16):
        (torch.eye(4) @ weight).sum().backward()
    assert weight.grad.equal(torch.ones(4, 4))
    assert copy.grad is None


def other_memory(weight: Tensor, copy: Tensor) -> None:
    weight.data = weight.data + 1


def in_place(weight: Tensor, copy: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def copy_written(weight: Tensor, copy: Tensor) -> None:
    copy.zero_()


CHANGES = (other_memory, in_place, copy_written)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_not_used_after(weight: Tensor, change: Callable[[Tensor, Tensor], None]) -> None:
    copy = provide(weight)
    change(weight, copy)
    assert casts(weight) == 1
    again = provide(weight)
    assert casts(weight) == 0
    del again


def test_of_another_dtype(weight: Tensor) -> None:
    copy = provide(weight)
    assert casts(weight, torch.bfloat16) == 1
    del copy


def test_kept_by_nobody_else(weight: Tensor) -> None:
    provide(weight)
    assert casts(weight) == 1  # the copy is gone


def test_not_cast_together(weight: Tensor) -> None:
    other, copy = weight.detach().clone().requires_grad_(), provide(weight)
    amp_ext.cast_weights_together()
    try:
        for _ in range(2):
            with amp_ext.autocast("cpu", dtype=torch.float16), Seen() as seen:
                product = torch.eye(4) @ other @ weight
        assert seen.casts <= 2  # of the input and of the other weight
        assert product.equal((other @ weight).half())
    finally:
        amp_ext.cast_weights_together(False)
    del copy


def test_overwritten_before_backward(weight: Tensor) -> None:
    """As of a weight that is itself an operand."""
    copy = provide(weight)
    x = torch.eye(4).requires_grad_()
    with amp_ext.autocast("cpu", dtype=torch.float16):
        loss = (x @ weight).sum()
    copy.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
