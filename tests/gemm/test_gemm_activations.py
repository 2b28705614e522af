"""Test activations of amp_ext::gemm, their stored arguments, and derivatives times products."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import _C, ops
from cases import (
    ACTIVATIONS,
    CURVED,
    FLOATS,
    assert_equal,
    assert_same,
    assert_sum_near,
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
@every_size
@every_kind
@every_activation
def test_product_times_derivative(
    executor: Executor,
    activation: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int],
) -> None:
    """The product times a derivative, and its column sums, are within their error bounds.

    A derivative is a sum of two terms below 1, each of a few operations: off by 8 units at most. A
    column's sum has rows that are off by that and as many additions.
    """
    m, n, k = sizes
    unit = 2.0**-52 if FP64 in dtypes else 2.0**-24
    for batch, aux_dtype in zip(itertools.cycle(BATCHES), FLOATS, strict=False):
        a = normal((*batch, m, k), dtypes[0], executor.device)
        b = normal((k, n), dtypes[1], executor.device)
        aux = normal((*batch, m, n), aux_dtype, executor.device)
        aux[..., 0, 0] = 0.0
        # A library may round a 16-bit product first: on a GPU, or if the CPU multiplies the type.
        multiplies = _C.multiplies(dtypes[0]) or executor.device.type != "cpu"
        may_round = dtypes[0] == BF16 or (dtypes[0] == FP16 and multiplies)
        options = {"activation": activation, "out_dtype": FP32 if may_round else None}
        y, sums = executor.ops.gemm_times_derivative(a, b, aux, **options)
        exact, exact_sums = reference.gemm_times_derivative(
            a.double(), b.double(), aux, activation=activation
        )
        magnitude = SLOPE * (a.double().abs() @ b.double().abs())
        assert_sum_near(y, exact, magnitude, k + 8, unit)
        assert sums.dtype == (FP64 if FP64 in dtypes else FP32)
        rows = magnitude.flatten(0, -2)
        assert_sum_near(sums, exact_sums, rows.sum(0), k + 8 + len(rows), unit)


@against_oracle
@every_curved
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_products_by_a_library(executor: Executor, dtype: torch.dtype, activation: str) -> None:
    """A library may round to 16 bits before the activation or its derivative, as torch does."""
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
    y, sums = executor.ops.gemm_times_derivative(a, b, aux, activation=activation)
    exact, _ = reference.gemm_times_derivative(a.double(), b.double(), aux, activation=activation)
    error = rounded + spacing(exact.cpu().abs() + rounded, dtype) / 2
    assert ((y.double().cpu() - exact.cpu()).abs() <= error).all()
    assert ((sums.double().cpu() - exact.sum(0).cpu()).abs() <= error.sum(0)).all()
    assert sums.dtype == FP32


@every_executor
@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, FP64], ids=str)  # torch's library computes FP64
def test_column_sums_of_nothing(
    executor: Executor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    a = torch.ones(*shape[:-1], 4, device=executor.device, dtype=dtype)
    b = torch.ones(4, shape[-1], device=executor.device, dtype=dtype)
    aux = torch.ones(shape, device=executor.device)
    y, sums = executor.ops.gemm_times_derivative(a, b, aux, activation="gelu")
    assert y.shape == shape
    assert sums.tolist() == [0.0] * shape[-1]


@every_executor
def test_derivatives_of_batches_and_layouts(executor: Executor) -> None:
    """Integer products times relu's derivative are exact.

    The cases are transposed or unbatched operands, and strided or expanded aux.
    """
    a, b = integers((3, 4, 5, 7), FP16, executor.device), integers((6, 7), FP16, executor.device)
    product = a.double() @ b.double().mT
    aux = integers((3, 4, 5, 12), FP32, executor.device)
    for case in (
        aux[..., ::2],
        aux[..., :6],
        aux[..., :6].mT.contiguous().mT,
        aux[:, :1, :, :6].expand(3, 4, 5, 6),
    ):
        exact = torch.where(case > 0, product, 0.0)
        for left, right, options in (
            (a, b, {"trans_b": True}),
            (a.mT.contiguous(), b.mT, {"trans_a": True}),
            (a, b.repeat(3, 4, 1, 1), {"trans_b": True}),
        ):
            y, sums = executor.ops.gemm_times_derivative(
                left, right, case, **options, activation="relu", out_dtype=FP32
            )
            assert_equal(y, exact)
            assert_equal(sums, exact.sum((0, 1, 2)))


# Numbers where formulas of activations overflow or have no value, and the limits of derivatives.
SPECIAL = {math.inf: 1.0, -math.inf: 0.0, 1e30: 1.0, -1e30: 0.0, 200.0: 1.0, -200.0: 0.0}


@every_gemm_executor
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@every_activation
def test_activations_of_special_values(
    executor: Executor, activation: str, dtype: torch.dtype
) -> None:
    """Activations of special values, and their derivatives, have the right limits.

    An overflowed FP16 aux makes no NaN gradient. Both CUDA kernels take products of such sizes.
    torch's formulas give NaN where BF16 overflows.
    """
    numbers = [x for x in SPECIAL if dtype != BF16 or abs(x) < 1e30]
    zeros = 15 - len(numbers)
    special = [*numbers, math.nan, -0.0, *(zeros - 1) * [0.0]]
    aux = torch.tensor(4 * [special], device=executor.device).to(dtype)
    kind = FP16 if dtype == FP32 else dtype
    a = torch.full((4, 8), 2.0**-3, dtype=kind, device=executor.device)
    b = torch.ones(8, 16, dtype=kind, device=executor.device)
    y, _ = executor.ops.gemm_times_derivative(a, b, aux, activation=activation, out_dtype=dtype)
    nan = {"none": 1.0, "relu": 1.0}.get(activation, math.nan)
    zero = {"none": 1.0, "relu": 0.0}.get(activation, 0.5)
    limits = [1.0 if activation == "none" else SPECIAL[x] for x in numbers]
    assert_equal(y, torch.tensor(4 * [[*limits, nan, *zeros * [zero]]], dtype=FP64))
    bias = torch.tensor([1e30, -1e30, 200.0, -200.0, *4 * [math.nan]], device=executor.device)
    options = {"alpha": 0.0, "bias": bias, "activation": activation, "out_dtype": FP32}
    out = executor.ops.gemm(a, b[:, :8], **options)
    assert_equal(out, ACTIVATIONS[activation](bias.double()).expand(4, 8))


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
    """relu stops non-finite values as torch's threshold_backward does: 0 * inf makes no NaN."""
    aux = torch.tensor([[0.0, -1.0, 1.0]], device=executor.device)
    b = torch.tensor([[math.inf, math.nan, math.inf]], device=executor.device)
    one = torch.ones(1, 1, device=executor.device)
    y, _ = executor.ops.gemm_times_derivative(one, b, aux, activation="relu")
    assert y.tolist() == [[0.0, 0.0, math.inf]]


@every_gemm_executor
def test_column_sums_are_of_unrounded_values(executor: Executor) -> None:
    """Products beyond FP16, and below its spacing, count in full."""
    a, b, aux = (torch.zeros(m, 8, device=executor.device).half() for m in (3, 8, 3))
    a[:, 0] = torch.tensor([300.0, 0.5, -299.0])
    b[0, :2] = torch.tensor([256.0, 1.0])
    y, sums = executor.ops.gemm_times_derivative(a, b, aux)
    assert y[:, 0].tolist() == [math.inf, 128.0, -math.inf]
    assert sums[:2].tolist() == [384.0, 1.5]


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
