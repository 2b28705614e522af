"""Test first and second gradients of amp_ext::gemm: derivatives, dtypes, errors, overflow."""

from __future__ import annotations

import itertools
import math
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


# ---- mixed precision ---------------------------------------------------------------------------


@every_executor
@every_form
def test_exact_gradients(executor: Executor, form: Form) -> None:
    """Gradients of integers are exact: each is rounded once, to the dtype of its tensor."""
    c_dtypes, out_dtypes = itertools.cycle(FLOATS), itertools.cycle((FP32, None, BF16, FP64, FP16))
    for dtypes, c_dtype, out_dtype in zip(2 * PAIRS, c_dtypes, out_dtypes, strict=False):
        leaves = form.leaves(SMALL, lambda shape: integers(shape, FP64, executor.device))
        leaves = cast(leaves, (*dtypes, c_dtype, c_dtype))
        options = form.options | {"out_dtype": out_dtype}
        grad = torch.ones_like(executor.ops.gemm(**leaves, **options))
        grad = integers(tuple(grad.shape), grad.dtype, executor.device)
        exact = gradients(reference.gemm, doubles(leaves), grad.double(), **form.options)
        for name, actual in gradients(executor.ops.gemm, leaves, grad, **options).items():
            assert (actual.dtype, actual.shape) == (leaves[name].dtype, leaves[name].shape)
            assert_equal(actual, exact[name])


@every_executor
def test_gradients_of_fp32_tensors_never_pass_through_fp16(executor: Executor) -> None:
    activations = torch.full((513, 1), 256.0, device=executor.device).half()
    weight, bias = torch.ones(2, 1, device=executor.device), torch.ones(2, device=executor.device)
    leaves = {"a": activations, "b": weight, "bias": bias, "c": weight.mT.clone()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    grad = torch.tensor([[1.0, 2.0**-24]], device=executor.device).half().expand(513, 2)
    options = {"trans_b": True, "beta": 256.0, "out_dtype": FP16}
    found = gradients(executor.ops.gemm, leaves, grad, **options)
    large, small = 513 * 256.0, 513 * 256.0 * 2.0**-24
    assert found["b"].tolist() == [[large], [small]]
    assert found["c"].tolist() == [[large, small]]
    assert found["bias"].tolist() == [513.0, 513 * 2.0**-24]
    leaves["b"] = weight.detach().half().requires_grad_()
    assert gradients(executor.ops.gemm, leaves, grad, **options)["b"][0].item() == math.inf


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
        assert not actual.to(dtype).double().equal(exact[name])


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


# ---- edges -------------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("zero", "mknx")
def test_empty_gradients(executor: Executor, zero: str) -> None:
    """A gradient of an empty sum is zero."""
    for form in (FORMS[name] for name in ("batch", "shared-a", "shared-b", "sum")):
        leaves = form.leaves(
            SMALL | {zero: 0}, lambda shape: integers(shape, FP32, executor.device)
        )
        out = executor.ops.gemm(**leaves, **form.options)
        grad = torch.ones_like(out).double()
        exact = gradients(reference.gemm, doubles(leaves), grad, **form.options)
        out.sum().backward()
        for name, leaf in leaves.items():
            assert_equal(leaf.grad, exact[name])
