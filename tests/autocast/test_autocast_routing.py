"""Test the routing of ops to amp_ext's GEMM, with the values and gradients of every form."""

from __future__ import annotations

import contextlib

import pytest
import torch

import amp_ext
from autocast_cases import BROADCAST, FORMS, LOW, Form, Seen
from cases import assert_equal

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("low", LOW, ids=["fp16", "bf16"])
@every_form
def test_routed(form: Form, low: torch.dtype) -> None:
    """A form is one product with torch's dtype, shape and strides.

    The result and each gradient are sums in FP32, rounded once to the dtype of their tensor. All
    sums are exact in FP32. Operands are whole numbers once they are rounded to 16 bits. Addends
    decide about ties, unless they are rounded first.
    """
    count = len(form.operands)
    region = amp_ext.autocast("cpu", low)
    for i, dtypes in enumerate(([FP32], [low], [low, FP32], [FP32, low], [FP16, BF16])):
        values = form.integers(63)
        kinds = [dtypes[j % len(dtypes)] if j < count else dtypes[-1] for j in range(len(values))]
        operands = [value * (1 + 2.0**-14) for value in values[:count]]
        addends = [16 * value + 2.0**-7 for value in values[count:]]
        tensors = [t.to(kind) for t, kind in zip(operands + addends, kinds, strict=True)]
        # torch's library rounds addends; it serves where the processor multiplies the dtype itself.
        rounds = [j < count or amp_ext._C.multiplies(low) for j in range(len(values))]
        exact = [t.to(low if r else t.dtype).double() for t, r in zip(tensors, rounds, strict=True)]
        for leaf in (*tensors, *exact):
            leaf.requires_grad_()

        with region, Seen() as seen:
            result = form(*tensors)
        with torch.autocast("cpu", low):
            torchs = form(*tensors)
        with region, torch.no_grad():
            assert form(*tensors).equal(result)
        with torch.no_grad():
            for tensor in tensors if dtypes == [FP32] else ():
                tensor.mul_(2)  # the call has saved 16-bit copies
        cotangent = torch.randint_like(result, -100, 101)
        with region if i % 2 else contextlib.nullcontext():
            result.backward(cotangent)

        assert (seen.gemms, seen.torchs) == (1, 0), seen.ops
        assert (result.dtype, result.shape) == (low, torchs.shape)
        used = [d for d, size in enumerate(result.shape) if size > 1]
        assert [result.stride(d) for d in used] == [torchs.stride(d) for d in used]
        assert torchs._is_view() or not result._is_view()
        expected = form(*exact)
        assert_equal(result, expected)
        gradients = torch.autograd.grad(expected, exact, cotangent.double())
        for tensor, gradient in zip(tensors, gradients, strict=True):
            assert tensor.grad.dtype == tensor.dtype
            if tensor.dtype == FP32 or form is not FORMS[BROADCAST]:  # autograd adds up the batch
                assert_equal(tensor.grad, gradient)


@every_form
def test_second_order(form: Form) -> None:
    """Second derivatives of routed products of small whole numbers are exact.

    The weights of the gradients, whole numbers times 1 + 2**-14, are FP32 alone. The gradient of
    the 16-bit cotangent has a part from each of the gradients, rounded by 2**-11 of it.
    """
    values = form.integers(1)
    weights = [torch.randint_like(value, -1, 2) * (1 + 2.0**-14) for value in values]
    values.append(torch.randint_like(form(*values), -1, 2))
    found = []
    for dtype, region in (
        (FP32, amp_ext.autocast("cpu", FP16)),
        (FP64, contextlib.nullcontext()),
    ):
        leaves = [value.to(dtype, copy=True).requires_grad_() for value in values]
        with region:
            result = form(*leaves[:-1])
        grads = torch.autograd.grad(result, leaves[:-1], leaves[-1].to(result), create_graph=True)
        penalty = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))
        unused = {"allow_unused": True, "materialize_grads": True}
        found.append(torch.autograd.grad(penalty, leaves, **unused))
    *of_tensors, (of_cotangent, exact) = zip(*found, strict=True)
    for gradient, expected in of_tensors:
        assert gradient.dtype == FP32
        assert_equal(gradient, expected)
    error = (of_cotangent - exact).abs().flatten()
    assert (error <= 2.0**-8 * exact.abs().amax() if exact.numel() else error).all()
