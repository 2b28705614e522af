"""Test activations of amp_ext::gemm, their stored arguments and derivatives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import (
    ACTIVATIONS,
    CURVED,
    FLOATS,
    assert_equal,
    assert_same,
    integers,
    normal,
    spacing,
)
from executors import Executor, against_oracle, every_executor, every_gemm_executor
from gemm_cases import SLOPE, assert_near, every_kind, every_size, gemm

FP16, BF16, FP32, FP64 = FLOATS
BATCHES = [(), (3,), (2, 3)]
every_curved = pytest.mark.parametrize("activation", CURVED)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@against_oracle
@every_size
@every_kind
@every_curved
def test_values_and_aux(
    executor: Executor,
    activation: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int],
) -> None:
    """Values are rounded once, into every dtype; aux is the result of gemm without the activation.

    (torch rounds float64 to 16 bits by way of float32.)
    """
    m, n, k = sizes
    out_dtypes = FLOATS[2:] if FP64 in dtypes else (None, *FLOATS)
    for batch, out_dtype in zip(itertools.cycle(BATCHES), out_dtypes, strict=False):
        a = normal((*batch, m, k), dtypes[0], executor.device)
        b = normal((n, k), dtypes[1], executor.device)
        options = {"trans_b": True, "bias": normal((n,), FP32, executor.device)}
        actual = gemm(executor, a, b, **options, activation=activation, out_dtype=out_dtype)
        assert_near(actual, a, b, **options, activation=activation)
        out, aux = executor.ops.gemm_with_aux(
            a, b, **options, activation=activation, out_dtype=out_dtype
        )
        assert_same(out, actual)
        assert_near(aux, a, b, **options)


@every_executor
@every_activation
def test_aux_of_exact_sums(executor: Executor, activation: str) -> None:
    """The aux of exact sums of integers is x itself, for every argument of gemm."""
    a, b = integers((2, 9, 7), FP16, executor.device), integers((2, 5, 7), FP32, executor.device)
    c, bias = integers((9, 1), FP32, executor.device), integers((5,), FP16, executor.device)
    options = {"trans_b": True, "c": c, "alpha": 0.5, "beta": -2.0, "bias": bias}
    x = 0.5 * (a.double() @ b.double().mT) - 2 * c.double() + bias.double()
    out, aux = executor.ops.gemm_with_aux(a, b, **options, activation=activation)
    assert (out.dtype, aux.dtype) == (FP32, FP32)
    assert_equal(aux, x)
    assert_same(out, executor.ops.gemm(a, b, **options, activation=activation))
    summed = executor.ops.gemm_with_aux(a, b, trans_b=True, sum_batch=True, activation=activation)
    assert_equal(summed[1], (a.double() @ b.double().mT).sum(0))


@every_executor
@every_curved
def test_is_torchs_activation(executor: Executor, activation: str) -> None:
    """Activations of every FP16 number equal torch's in FP64, within the FP32 formula's error."""
    x = torch.arange(-(2**15), 2**15, device=executor.device).to(torch.int16).view(FP16)
    one = torch.ones(1, 1, device=executor.device)
    actual = executor.ops.gemm(x[:, None], one, activation=activation)[:, 0]
    exact = ACTIVATIONS[activation](x.double())
    finite = x.isfinite()
    error = (actual.double() - exact)[finite].abs()
    assert (error <= 4 * 2.0**-24 * x[finite].double().abs()).all()
    assert actual[x.isnan()].isnan().all()
    assert not actual[x == math.inf].isfinite().any()  # torch has inf or NaN, as vectors go


@against_oracle
@every_curved
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_products_by_a_library(executor: Executor, dtype: torch.dtype, activation: str) -> None:
    """A library may round to 16 bits before the activation, as torch does."""
    m, n, k = 130, 70, 66
    a, b = normal((m, k), dtype, executor.device), normal((k, n), dtype, executor.device)
    x = (a.double() @ b.double()).cpu()
    unrounded = (k + 8) * 2.0**-24 * (a.double().abs() @ b.double().abs()).cpu()
    rounded = unrounded + SLOPE * spacing(x, dtype) / 2
    out, aux = executor.ops.gemm_with_aux(a, b, activation=activation)
    exact = reference.gemm(a, b, activation=activation, out_dtype=FP64).cpu()
    for actual, expected, error in ((out, exact, rounded), (aux, x, unrounded)):
        allowed = error + spacing(expected.abs() + error, dtype) / 2
        assert ((actual.double().cpu() - expected).abs() <= allowed).all()


@every_gemm_executor
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@every_activation
def test_activations_of_special_values(
    executor: Executor, activation: str, dtype: torch.dtype
) -> None:
    """Activations of huge sums and of NaN have the right limits.

    Both CUDA kernels take products of such sizes.
    """
    a = torch.full((4, 8), 2.0**-3, dtype=dtype, device=executor.device)
    b = torch.ones(8, 8, dtype=dtype, device=executor.device)
    bias = torch.tensor([1e30, -1e30, 200.0, -200.0, *4 * [math.nan]], device=executor.device)
    options = {"alpha": 0.0, "bias": bias, "activation": activation, "out_dtype": FP32}
    out = executor.ops.gemm(a, b, **options)
    assert_equal(out, ACTIVATIONS[activation](bias.double()).expand(4, 8))


@against_oracle
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_activation
def test_gradients_at_special_values(
    executor: Executor, activation: str, dtype: torch.dtype
) -> None:
    """Gradients have the derivative's limits. torch's formulas give NaN where BF16 overflows."""
    far = [200.0] if dtype == BF16 else [math.inf, 1e30]
    values = [*far, *(-x for x in far), 0.0, -0.0, math.nan]
    x = torch.tensor(values, device=executor.device).to(dtype)[:, None].requires_grad_()
    one = torch.ones_like(x[:1])
    (grad,) = torch.autograd.grad(ops.gemm(x, one, activation=activation).sum(), x)
    low = 1.0 if activation == "none" else 0.0
    zero = {"none": 1.0, "relu": 0.0}.get(activation, 0.5)
    nan = 1.0 if activation in ("none", "relu") else math.nan
    expected = [*len(far) * [1.0], *len(far) * [low], zero, zero, nan]
    assert_equal(grad.flatten(), torch.tensor(expected, dtype=FP64))


@against_oracle
@pytest.mark.parametrize(("dtype", "far"), [(FP16, 300.0), (BF16, 1e20)], ids=str)
@every_curved
def test_second_derivatives_far_out(
    executor: Executor, activation: str, dtype: torch.dtype, far: float
) -> None:
    """Derivatives have their limits at numbers with a square or cube beyond the dtype, or NaN."""
    a = torch.tensor([[far], [-far], [torch.nan]], dtype=dtype, device=executor.device)
    out = ops.gemm(a.requires_grad_(), torch.ones_like(a[:1]), activation=activation)
    (first,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    assert first.flatten()[:2].tolist() == [1.0, 0.0]
    assert second.flatten()[:2].tolist() == [0.0, 0.0]
    assert second[2].isnan()


@against_oracle
@every_curved
def test_derivatives_where_float16_overflows(executor: Executor, activation: str) -> None:
    """Derivatives have their limits where a saved pre-activation is infinite, unlike its sum."""
    x = torch.tensor([[200.0], [-200.0]], dtype=FP16, device=executor.device).requires_grad_()
    weight = torch.full_like(x[:1], 400.0)
    (grad,) = torch.autograd.grad(ops.linear(x, weight, activation=activation).sum(), x)
    assert grad.tolist() == [[400.0], [0.0]]


@every_executor
def test_relu_stops_what_is_not_finite(executor: Executor) -> None:
    """relu's gradient stops non-finite values as torch's does: 0 * inf makes no NaN."""
    x = torch.tensor([[0.0, -1.0, 1.0]], device=executor.device).mT.requires_grad_()
    one = torch.ones(1, 1, device=executor.device)
    out = executor.ops.gemm(x, one, activation="relu")
    out.backward(torch.tensor([[math.inf], [math.nan], [math.inf]], device=executor.device))
    assert x.grad.flatten().tolist() == [0.0, 0.0, math.inf]


@every_executor
@every_activation
def test_both_results_are_differentiable(executor: Executor, activation: str) -> None:
    a, b = (normal((3, 4), FP64, executor.device).requires_grad_() for _ in range(2))
    bias = normal((3,), FP64, executor.device).requires_grad_()

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        options = {"trans_b": True, "bias": tensors[2], "activation": activation}
        return executor.ops.gemm_with_aux(*tensors[:2], **options)

    assert torch.autograd.gradcheck(run, (a, b, bias))
    assert torch.autograd.gradgradcheck(run, (a, b, bias))


@against_oracle
@every_activation
def test_transforms_of_functions(executor: Executor, activation: str) -> None:
    """Function transforms work over parameters that require gradients, and over each other."""
    x, weight = (normal((3, 3), FP64, executor.device) for _ in range(2))

    def transformed(op: Any, parameter: Tensor) -> list[Tensor]:
        def function(w: Tensor) -> Tensor:
            return op(x, w, activation=activation)

        jacobian = torch.func.jacrev(function)
        gradient = torch.func.grad(lambda w: function(w).square().sum())
        return [f(parameter) for f in (gradient, jacobian, torch.func.jacrev(jacobian))]

    expected = transformed(reference.linear, weight)
    for parameter in (weight, torch.nn.Parameter(weight)):
        torch.testing.assert_close(transformed(ops.linear, parameter), expected)
