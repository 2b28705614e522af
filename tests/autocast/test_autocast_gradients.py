"""Test that fp32 gradients never pass through 16 bits and can be differentiated again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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


def leaves(form: Form, *dtypes: Any) -> list[Tensor]:
    """Random tensors for a form that require gradients."""
    return [tensor.requires_grad_() for tensor in form.tensors(*dtypes)]


def first_order(
    form: Form, values: list[Tensor], scalars: Mapping[str, float], cotangent: Tensor
) -> tuple[Tensor, ...]:
    """Gradients in fp64."""
    values = [value.requires_grad_() for value in values]
    return torch.autograd.grad(form.run(*values, **scalars), values, cotangent)


def three_times(
    form: Form, tensors: list[Tensor], dtype: torch.dtype, others: list[Tensor], compute: Any
) -> list[tuple[Tensor, ...]]:
    """Return `compute` on the values in fp64, on their magnitudes, and on ones to count terms."""
    values, others = form.rounded(tensors, dtype), [other.detach().double() for other in others]
    return [
        compute(form, values, form.scalars, *others),
        compute(form, [v.abs() for v in values], form.absolute(), *[o.abs() for o in others]),
        compute(form, [*map(torch.ones_like, values)], {}, *map(torch.ones_like, others)),
    ]


@every_dtype
@every_form
def test_first_order(form: Form, dtype: torch.dtype) -> None:
    for kinds in ([FP32], [dtype], [dtype, FP32]):
        tensors = leaves(form, kinds, kinds[-1])
        with amp_ext.autocast("cpu", dtype=dtype):
            result = form.run(*tensors, **form.scalars)
        cotangent = torch.randn_like(result)
        result.backward(cotangent)
        expected = three_times(form, tensors, dtype, [cotangent], first_order)
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
        allowed = 2.0**-8 * wanted.abs().max() if tensor is cotangent else 0.0
        assert ((grad.double() - wanted).abs() <= allowed).all()


# Name -> a product of inputs [2, 4] and a weight [4, 4]; row i takes input i alone.
WEIGHTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "mm": lambda x, w: x.mm(w.t()),
    "matmul": lambda x, w: x @ w.t(),
    "matmul 3-D": lambda x, w: x.unsqueeze(0) @ w.t(),
    "bmm": lambda x, w: x.unsqueeze(0).bmm(w.t().unsqueeze(0)),
    "addmm": lambda x, w: torch.addmm(x, x, w.t()),
    "baddbmm": lambda x, w: torch.baddbmm(x, x.unsqueeze(0), w.t().unsqueeze(0)),
    "einsum": lambda x, w: torch.einsum("ni,oi->no", x, w),
    "conv2d": lambda x, w: F.conv2d(x.t()[None, :, None], w[:, :, None, None]),
    "conv2d, same": lambda x, w: F.conv2d(
        x.t()[None, :, None], w[:, :, None, None], padding="same"
    ),
}
every_weighted = pytest.mark.parametrize("run", WEIGHTED.values(), ids=WEIGHTED)


def weight_gradient(region: Any, run: Any, inputs: float, cotangent: float) -> Tensor:
    """Return the gradient of an fp32 weight for constant fp16 inputs and cotangents."""
    weight = torch.eye(4).requires_grad_()
    with region("cpu", dtype=FP16):
        result = run(torch.full((2, 4), inputs, dtype=FP16), weight)
    result.backward(torch.full_like(result, cotangent))
    return weight.grad


@every_weighted
def test_weight_gradient_never_passes_through_fp16(run: Any) -> None:
    """A weight gradient has every bit, at 2 x 61440 > 65504, and below FP16's subnormals."""
    assert weight_gradient(amp_ext.autocast, run, 1.0, 61440.0).eq(122880.0).all()
    assert weight_gradient(torch.autocast, run, 1.0, 61440.0).isinf().all()
    half = torch.tensor(1e-8**0.5).half().item()
    exact = 2 * half * half  # 23 significant bits at most: an fp32 number
    assert weight_gradient(amp_ext.autocast, run, half, half).eq(exact).all()
    assert weight_gradient(torch.autocast, run, half, half).eq(0).all()


def test_gradient_of_a_vector_never_passes_through_fp16() -> None:
    """The gradient of an op's 1-D argument is beyond FP16's range."""
    x = torch.ones(4, requires_grad=True)
    with amp_ext.autocast("cpu", dtype=FP16):
        result = amp_ext.ops.linear(x, torch.ones(2, 4))
    result.backward(torch.full_like(result, 61440.0))
    assert x.grad.eq(122880.0).all()


@every_dtype
@every_weighted
def test_backward_within_the_region(run: Any, dtype: torch.dtype) -> None:
    tensors = [torch.randn(2, 4), torch.randn(4, 4)]
    grads = []
    for inside in (False, True):
        x, weight = (tensor.clone().requires_grad_() for tensor in tensors)
        with amp_ext.autocast("cpu", dtype=dtype):
            result = run(x, weight)
            cotangent = result.detach().clone()
            if inside:
                result.backward(cotangent)
        if not inside:
            result.backward(cotangent)
        grads.append((x.grad, weight.grad))
    for one, other in zip(*grads, strict=True):
        assert one.dtype == FP32
        assert one.equal(other)


def whole(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Small whole numbers, so that sums of products are exact in every dtype."""
    return torch.randint(-3, 4, shape).to(dtype)


def fp16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with amp_ext.autocast("cpu", dtype=FP16):
        return F.linear(x, weight, bias)


def test_hooks() -> None:
    seen: list[tuple[str, torch.dtype]] = []
    x, weight = whole(2, 4).requires_grad_(), whole(3, 4).requires_grad_()
    result = fp16_linear(x, weight)
    x.register_hook(lambda grad: seen.append(("x", grad.dtype)))
    weight.register_hook(lambda grad: 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(("weight", leaf.grad.dtype)))
    result.register_hook(lambda grad: seen.append(("result", grad.dtype)))
    cotangent = whole(2, 3, dtype=FP16)
    result.backward(cotangent)
    assert sorted(seen) == [("result", FP16), ("weight", FP32), ("x", FP32)]
    assert weight.grad.equal(2 * cotangent.float().t() @ x.detach())


def test_tied_weights() -> None:
    x, weight, cotangent = whole(2, 4), whole(3, 4).requires_grad_(), whole(2, 4, dtype=FP16)
    with amp_ext.autocast("cpu", dtype=FP16):
        result = F.linear(x, weight) @ weight
    (actual,) = torch.autograd.grad(result, weight, cotangent)
    expected = torch.autograd.grad(F.linear(x, weight) @ weight, weight, cotangent.float())
    assert actual.equal(expected[0])


@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["x", "weight", "bias"])
def test_frozen_tensors_get_no_gradient(frozen: int) -> None:
    tensors = [whole(2, 4), whole(3, 4), whole(3)]
    for place, tensor in enumerate(tensors):
        tensor.requires_grad_(place != frozen)
    fp16_linear(*tensors).sum().backward()
    assert [place for place, tensor in enumerate(tensors) if tensor.grad is None] == [frozen]


def test_fp32_operand_may_change_after_the_call() -> None:
    """An fp32 operand may change after the call: the call saves the 16-bit copy, as torch does."""
    hidden, weight = 1 * whole(2, 4).requires_grad_(), whole(3, 4).requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone()
    hidden.retain_grad()
    result = fp16_linear(hidden, weight)
    with torch.no_grad():
        weight.mul_(2)
        hidden.detach().mul_(2)
    result.sum().backward()
    assert weight.grad.equal(before[0].sum(0).expand(3, 4))
    assert hidden.grad.equal(before[1].sum(0).expand(2, 4))


def test_saved_fp16_operand_must_not_change() -> None:
    x, weight = whole(2, 4, dtype=FP16), whole(3, 4).requires_grad_()
    result = fp16_linear(x, weight)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_result_may_change_in_place() -> None:
    x, weight = whole(4, 4), whole(3, 4).requires_grad_()
    result = fp16_linear(x, weight)
    expected = (result.detach() > 0).float().t() @ x
    result.relu_().sum().backward()
    assert weight.grad.equal(expected)
