"""Test that fp32 gradients never pass through 16 bits and can be differentiated again."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from autocast_cases import EXPANDED, FORMS, LOW, Form, assert_within

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_dtype = pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])
FP16, FP32 = torch.float16, torch.float32


@every_dtype
@every_form
def test_first_order(form: Form, dtype: torch.dtype) -> None:
    """Gradients are rounded once, to the dtype of their tensor, also by a backward pass within."""

    def compute(values: list[Tensor], scalars: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        values = [value.requires_grad_() for value in values]
        return torch.autograd.grad(form.run(*values, **scalars), values, cotangent)

    for kinds in ([FP32], [dtype], [dtype, FP32]):
        tensors = [tensor.requires_grad_() for tensor in form.tensors(kinds, kinds[-1])]
        with amp_ext.autocast("cpu", dtype=dtype):
            result = form.run(*tensors, **form.scalars)
            cotangent = torch.randn_like(result)
            if len(kinds) == 2:
                result.backward(cotangent)
        if len(kinds) == 1:
            result.backward(cotangent)
        expected = form.bounds(compute, tensors, dtype, cotangent)
        for tensor, *wanted in zip(tensors, *expected, strict=True):
            assert tensor.grad.dtype == tensor.dtype
            assert_within(tensor.grad, *wanted, partial_sums=form in [FORMS[n] for n in EXPANDED])


def second_order(
    form: Form, tensors: list[Tensor], cotangent: Tensor, weights: list[Tensor], context: Any
) -> tuple[Tensor, ...]:
    """Return gradients of the sum of weights * gradients; zeros for missing ones."""
    inputs = [tensor.requires_grad_() for tensor in (*tensors, cotangent)]
    with context:
        result = form.run(*inputs[:-1], **form.scalars)
    grads = torch.autograd.grad(result, inputs[:-1], inputs[-1].to(result), create_graph=True)
    penalty = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))
    return torch.autograd.grad(penalty, inputs, allow_unused=True, materialize_grads=True)


@every_form
def test_second_order(form: Form) -> None:
    """Second derivatives of routed products of small whole numbers are exact.

    The weights of the gradients, whole numbers times 1 + 2**-14, are FP32 alone. The gradient of
    the 16-bit cotangent has a part from each of the gradients, rounded by 2**-11 of it.
    """
    tensors = [tensor.sign() for tensor in form.tensors([FP32], FP32)]
    weights = [torch.randint_like(tensor, -1, 2) * (1 + 2.0**-14) for tensor in tensors]
    cotangent = torch.randint_like(form.run(*tensors, **form.scalars), -1, 2)
    region = amp_ext.autocast("cpu", dtype=FP16)
    actual = second_order(form, tensors, cotangent, weights, region)
    given = [[t.detach().double() for t in ts] for ts in (tensors, [cotangent], weights)]
    exact = second_order(form, given[0], *given[1], given[2], contextlib.nullcontext())
    for tensor, grad, wanted in zip([*tensors, cotangent], actual, exact, strict=True):
        assert grad.dtype == tensor.dtype
        allowed = 2.0**-8 * wanted.abs().amax() if tensor is cotangent and wanted.numel() else 0.0
        assert ((grad.double() - wanted).abs() <= allowed).all()


def test_gradient_of_a_vector_never_passes_through_fp16() -> None:
    """The gradient of an op's 1-D argument is beyond FP16's range."""
    x = torch.ones(4, requires_grad=True)
    with amp_ext.autocast("cpu", dtype=FP16):
        result = amp_ext.ops.linear(x, torch.ones(2, 4))
    result.backward(torch.full_like(result, 61440.0))
    assert x.grad.eq(122880.0).all()


def test_fp32_operand_may_change_after_the_call() -> None:
    """An fp32 operand may change after the call: the call saves the 16-bit copy, as torch does."""
    hidden = 1 * torch.randint(-3, 4, (2, 4)).float().requires_grad_()
    weight = torch.randint(-3, 4, (3, 4)).float().requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone()
    hidden.retain_grad()
    with amp_ext.autocast("cpu", dtype=FP16):
        result = F.linear(hidden, weight)
    with torch.no_grad():
        weight.mul_(2)
        hidden.detach().mul_(2)
    result.sum().backward()
    assert weight.grad.equal(before[0].sum(0).expand(3, 4))
    assert hidden.grad.equal(before[1].sum(0).expand(2, 4))
