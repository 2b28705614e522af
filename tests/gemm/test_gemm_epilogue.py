"""Test amp_ext::gemm with alpha, beta and c, and bias, also without a product."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from cases import FLOATS, NON_FINITE, OPERANDS, PAIRS, assert_equal, normal
from executors import Executor, every_gemm_executor, gemm_against_oracle
from gemm_cases import assert_near_oracle, every_size, gemm

FP16, BF16, FP32, FP64 = FLOATS


C_SHAPES = ["", "1", "n", "m1", "1n", "mn", "311", "3m1", "3mn"]


@gemm_against_oracle
@every_size
@pytest.mark.parametrize("c_shape", C_SHAPES)
def test_epilogue(executor: Executor, c_shape: str, sizes: tuple[int, int, int]) -> None:
    """Every combination of alpha and beta works over broadcast shapes of c."""
    m, n, k = sizes
    shape = [{"m": m, "n": n}.get(letter) or int(letter) for letter in c_shape]
    combinations = itertools.product((1.0, 0.0, -0.3), (1.0, 0.0, 1.7), (FP16, FP32))
    dtypes, c_dtypes = itertools.cycle(PAIRS), itertools.cycle(FLOATS)
    bias_dtypes = itertools.cycle((None, *FLOATS))
    for alpha, beta, out_dtype in combinations:
        (a_dtype, b_dtype), c_dtype = next(dtypes), next(c_dtypes)
        bias_dtype = next(bias_dtypes)
        a = normal((3, m, k) if len(shape) == 3 else (m, k), a_dtype, executor.device)
        b = normal((k, n), b_dtype, executor.device)
        bias = None if bias_dtype is None else normal((n,), bias_dtype, executor.device)
        options = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype}
        c = normal(tuple(shape), c_dtype, executor.device)
        assert_near_oracle(executor, a, b, c=c, bias=bias, **options)


@gemm_against_oracle
@every_size
@pytest.mark.parametrize("layout", OPERANDS)
def test_layouts_of_c(executor: Executor, layout: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a = normal((3, m, k), FP16, executor.device)
    for c_dtype, b_dtype, out_dtype in zip(
        FLOATS, (FP16, FP32, FP16, FP32), (None, None, FP32, FP16), strict=True
    ):
        c = OPERANDS[layout](normal((3, m, n), c_dtype, executor.device))
        b = normal((k, n), b_dtype, executor.device)
        bias = normal((n, 2), FP32, executor.device)[:, 1]
        assert_near_oracle(executor, a, b, c=c, beta=0.7, bias=bias, out_dtype=out_dtype)


@every_gemm_executor
@pytest.mark.parametrize("k", [0, 4])
def test_c_is_not_read_when_beta_is_0(executor: Executor, k: int) -> None:
    a, b = torch.ones(3, k, device=executor.device), torch.ones(k, 3, device=executor.device).half()
    c = torch.tensor(NON_FINITE, device=executor.device).expand(3, 3)
    assert_equal(gemm(executor, a, b, c=c, beta=0.0), torch.full((3, 3), k, dtype=FP64))


@every_gemm_executor
@pytest.mark.parametrize(("batch", "dtype"), [((), FP16), ((2,), BF16), ((2,), FP64)], ids=str)
def test_inner_dimension_of_0(
    executor: Executor, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    a = torch.empty(*batch, 3, 0, dtype=dtype, device=executor.device)
    b = torch.empty(0, 2, dtype=dtype, device=executor.device)
    c, bias = torch.tensor([[1.0], [-8.0], [math.nan]]), torch.tensor([0.5, 6.0])
    c, bias = c.to(dtype).to(executor.device), bias.to(executor.device)
    zeros = torch.zeros(*batch, 3, 2, dtype=FP64)
    assert_equal(gemm(executor, a, b), zeros)
    expanded = a.new_ones(()).expand(*batch, 3, 0), b.new_ones(()).expand(0, 2)
    assert_equal(gemm(executor, *expanded), zeros)
    actual = gemm(executor, a, b, alpha=3.0, c=c, beta=2.0, bias=bias)
    exact = torch.tensor([[2.5, 8.0], [-15.5, -10.0], [math.nan, math.nan]], dtype=FP64)
    assert_equal(actual, exact.expand(actual.shape))
