"""What amp_ext::gemm_accumulate_ puts into square_sum: the sum of the squares of the new c."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import FLOATS, integers, normal, threads, unwritten
from executors import Executor, against_oracle, every_gemm_executor
from gemm_cases import PLACES, SIZES

FP16, BF16, FP32, FP64 = FLOATS
CPU = torch.device("cpu")

every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def sum_of_squares(c: Tensor) -> float:
    return c.double().square().sum().item()


@every_gemm_executor
@every_size
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_square_sum(
    executor: Executor,
    batch: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> None:
    """Of integers it is exact. What was there before does not matter, nor found_inf beside it."""
    m, n, k = sizes
    a, b = integers((*batch, m, k), dtype, CPU), integers((*batch, k, n), dtype, CPU)
    flag, squares = executor.scalar(0.0), executor.scalar(math.nan, FP64)
    for sum_batch in {False, bool(batch)}:
        c = integers((m, n) if sum_batch else (*batch, m, n), FP32, CPU)
        c, a, b = (tensor.to(executor.device) for tensor in (c, a, b))
        options = {"alpha": 0.5, "sum_batch": sum_batch, "square_sum": squares}
        executor.ops.gemm_accumulate_(c, a, b, **options)
        assert squares.item() == sum_of_squares(c)
        executor.ops.gemm_accumulate_(c, a, b, **options, found_inf=flag)
        assert squares.item() == sum_of_squares(c)
    assert flag.item() == 0.0


@every_gemm_executor
@pytest.mark.parametrize("k", [0, 5, 400])
@pytest.mark.parametrize("place", PLACES)
def test_square_sum_is_of_c_alone(executor: Executor, place: str, k: int) -> None:
    shape, view = PLACES[place]
    c = view(integers(shape, FP32, executor.device))
    a = integers((*c.shape[:-1], k), FP16, executor.device)
    b = integers((k, 50), FP16, executor.device)
    squares = executor.scalar(0.0, FP64).view(1)
    executor.ops.gemm_accumulate_(c, a, b, square_sum=squares)
    assert squares.item() == sum_of_squares(c)


@every_gemm_executor
@every_size
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_square_sum_that_is_large(
    executor: Executor, value: float, sizes: tuple[int, int, int]
) -> None:
    """Squares are formed in FP64: they overflow nowhere, and are not finite where c is not."""
    m, n, k = sizes
    a, b = (torch.zeros(s, dtype=FP16, device=executor.device) for s in ((m, k), (k, n)))
    c = torch.zeros(m, n, device=executor.device)
    c[m - 1, n - 1] = value
    flag, squares = executor.scalar(0.0), executor.scalar(0.0, FP64)
    executor.ops.gemm_accumulate_(c, a, b, found_inf=flag, square_sum=squares)
    expected = sum_of_squares(c)
    assert squares.item() == expected or math.isnan(squares.item()) == math.isnan(expected) is True
    assert flag.item() == (not math.isfinite(value))


@every_gemm_executor
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 2, 3)])
def test_square_sum_of_nothing(executor: Executor, shape: tuple[int, ...]) -> None:
    c = torch.zeros(shape, device=executor.device)
    a = torch.ones(*shape[:-1], 4, dtype=FP16, device=executor.device)
    b = torch.ones(4, shape[-1], dtype=FP16, device=executor.device)
    squares = executor.scalar(math.nan, FP64)
    executor.ops.gemm_accumulate_(c, a, b, square_sum=squares)
    assert squares.item() == 0.0


@against_oracle
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("sizes", [(40, 50, 60), (300, 400, 50)])
def test_square_sum_does_not_depend_on_threads(
    executor: Executor, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Of a c that is given: products of the library may depend on them."""
    m, n, k = sizes
    c = normal((3, m, n), FP32, executor.device)
    a, b = (torch.zeros(s, dtype=dtype, device=executor.device) for s in ((3, m, k), (k, n)))
    found = set()
    for count in (1, 2, 3, 7):
        squares = executor.scalar(0.0, FP64)
        with threads(count):
            executor.ops.gemm_accumulate_(c, a, b, square_sum=squares)
        found.add(squares.item())
    [only] = found
    assert math.isclose(only, sum_of_squares(c), rel_tol=1e-14)


def test_bad_square_sum() -> None:
    c, a, b = torch.zeros(3, 5), torch.ones(3, 4), torch.ones(4, 5)
    for bad, text in (
        (torch.zeros(2, dtype=FP64), r"square_sum must be a 1-element tensor, got shape \[2\]"),
        (torch.zeros(()), "square_sum must be a double tensor, got Float"),
        (torch.zeros((), dtype=FP64, device="meta"), "same device.*square_sum is on meta"),
        (c.view(-1)[:2].view(FP64), "c and square_sum overlap"),
    ):
        with unwritten([c]), pytest.raises(RuntimeError, match=f"gemm_accumulate_: .*{text}"):
            ops.gemm_accumulate_(c, a, b, square_sum=bad)
        if not bad.is_meta and "overlap" not in text:
            tensors = (tensor.to("meta") for tensor in (c, a, b))
            with pytest.raises(RuntimeError, match=text):
                ops.gemm_accumulate_(*tensors, square_sum=bad.to("meta"))
