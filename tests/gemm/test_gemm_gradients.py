"""Test first and second gradients of amp_ext::gemm: derivatives, dtypes, errors, overflow."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import reference
from cases import FLOATS, PAIRS, assert_equal, integers
from executors import Executor, against_oracle, every_executor
from gemm_cases import FORMS, SMALL, Form, Leaves, cast, doubles, gradients

FP16, BF16, FP32, FP64 = FLOATS

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_executor
@every_form
def test_exact_gradients(executor: Executor, form: Form) -> None:
    """Gradients of integers are exact: each is rounded once, to the dtype of its tensor.

    They have more digits than 16 bits hold. Gradients of empty sums, in the last cases, are zero.
    """
    c_dtypes, out_dtypes = itertools.cycle(FLOATS), itertools.cycle((FP32, None, BF16, FP64, FP16))
    empty = [*16 * [()], *"mknx"]
    for dtypes, c_dtype, out_dtype, zeros in zip(
        2 * PAIRS, c_dtypes, out_dtypes, empty, strict=False
    ):
        sizes = SMALL | dict.fromkeys(zeros, 0)
        leaves = form.leaves(sizes, lambda shape: integers(shape, FP64, executor.device, limit=63))
        leaves = cast(leaves, (*dtypes, c_dtype, c_dtype))
        options = form.options | {"out_dtype": out_dtype}
        grad = executor.ops.gemm(**leaves, **options).detach()
        grad = integers(tuple(grad.shape), grad.dtype, executor.device, limit=2000)
        exact = gradients(reference.gemm, doubles(leaves), grad.double(), **form.options)
        for name, actual in gradients(executor.ops.gemm, leaves, grad, **options).items():
            assert (actual.dtype, actual.shape) == (leaves[name].dtype, leaves[name].shape)
            assert_equal(actual, exact[name])


@against_oracle
@pytest.mark.parametrize(("dtype", "grad_dtype"), [(FP16, FP32), (BF16, FP32), (FP16, None)])
def test_fp32_gradients_of_16_bit_leaves(
    executor: Executor, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> None:
    """A leaf whose grad_dtype is FP32 or None gets a gradient that 16 bits cannot hold."""
    shapes = {"a": (65, 7), "b": (5, 7), "bias": (5,), "c": (65, 1)}
    leaves = {name: integers(s, dtype, executor.device, limit=200) for name, s in shapes.items()}
    for leaf in leaves.values():
        leaf.requires_grad_().grad_dtype = grad_dtype
    grad = integers((65, 5), dtype, executor.device, limit=200) * 200
    exact = gradients(
        reference.gemm, doubles(leaves), grad.double(), trans_b=True, alpha=0.5, beta=2.0
    )
    found = gradients(executor.ops.gemm, leaves, grad, trans_b=True, alpha=0.5, beta=2.0)
    for name, actual in found.items():
        assert actual.dtype == FP32
        assert actual.double().equal(exact[name])
        assert actual.abs().max() > 65504


@every_executor
@every_form
@pytest.mark.parametrize("dtypes", [(FP16, FP32), (FP16, FP16)], ids=str)
def test_gradient_penalty(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], form: Form
) -> None:
    """A loss with first gradients has the right gradient, in numbers that FP16 represents."""

    def second(run: Callable[..., Tensor], leaves: Leaves) -> tuple[Tensor, ...]:
        tensors = list(leaves.values())
        out = run(**leaves, **form.options)
        unused = {"allow_unused": True, "materialize_grads": True}
        loss = out.double().square().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True, **unused)
        assert first[0].requires_grad
        penalty = sum(grad.double().square().sum() for grad in first)
        return torch.autograd.grad(penalty, tensors, **unused)

    leaves = form.leaves(SMALL, lambda shape: integers(shape, FP64, executor.device, limit=1))
    leaves = cast(leaves, (*dtypes, FP32, FP32))
    actual = second(executor.ops.gemm, leaves)
    for mine, leaf, exact in zip(
        actual, leaves.values(), second(reference.gemm, doubles(leaves)), strict=True
    ):
        assert mine.dtype == leaf.dtype
        assert_equal(mine, exact)
