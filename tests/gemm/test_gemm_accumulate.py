"""Test amp_ext::gemm_accumulate_: c += alpha * A @ B in FP32."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import (
    FLOATS,
    OPERANDS,
    PAIRS,
    assert_equal,
    assert_sum_near,
    integers,
    normal,
    unwritten,
)
from executors import Executor, against_oracle, every_executor
from gemm_cases import every_kind, every_size, every_transpose, product

FP16, BF16, FP32, FP64 = FLOATS


@every_executor
@every_size
@every_transpose
def test_exact_sums(
    executor: Executor, trans: tuple[bool, bool], sizes: tuple[int, int, int]
) -> None:
    """Sums of integers are exact, with and without a batch; operands stay unchanged."""
    for layout, batch, dtypes in zip(
        2 * list(OPERANDS),
        itertools.cycle([(), (2,), (2, 3)]),
        itertools.cycle(PAIRS),
        strict=False,
    ):
        batch = batch or ((2,) if "batch" in layout else ())
        a, b, options, exact = product(executor, sizes, dtypes, trans, 2 * [layout], 2 * [batch])
        for sum_batch, alpha in itertools.product({False, bool(batch)}, (1.0, -0.5)):
            added = exact.flatten(0, -3).sum(0) if sum_batch else exact
            c = integers(tuple(added.shape), FP32, executor.device)
            expected = c.double() + alpha * added
            with unwritten([a, b]):
                result = executor.ops.gemm_accumulate_(
                    c, a, b, **options, sum_batch=sum_batch, alpha=alpha
                )
            assert result is None
            assert_equal(c, expected)


# Views of a larger tensor that the op writes to, as (its shape, the view).
PLACES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "whole": ((3, 33, 50), lambda t: t),
    "columns": ((3, 33, 70), lambda t: t[..., 7:57]),
    "rows": ((3, 40, 50), lambda t: t[:, 5:38]),
    "matrices": ((7, 33, 50), lambda t: t[1::2]),
    "batches": ((3, 1, 33, 50), lambda t: t),
}


@every_executor
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("k", [0, 400])
def test_writes_nothing_but_c(executor: Executor, k: int, place: str) -> None:
    """Memory around a view c is as it was."""
    shape, view = PLACES[place]
    whole = integers(shape, FP32, executor.device)
    c, expected = view(whole), whole.double()
    a = integers((*c.shape[:-1], k), FP16, executor.device)
    b = integers((k, 50), FP16, executor.device)
    view(expected).add_(a.double() @ b.double())
    executor.ops.gemm_accumulate_(c, a, b)
    assert_equal(whole, expected)


@against_oracle
@pytest.mark.parametrize("k", [7, 5000])
@every_kind
def test_error(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], k: int) -> None:
    """The error is at most the bound of a sum of k products and c, accumulated in FP32."""
    a = normal((33, k), dtypes[0], executor.device)
    b = normal((k, 40), dtypes[1], executor.device)
    c = 100 * normal((33, 40), FP32, executor.device)
    exact = c.double() + 0.3 * (a.double() @ b.double())
    magnitude = c.double().abs() + 0.3 * (a.double().abs() @ b.double().abs())
    executor.ops.gemm_accumulate_(c, a, b, alpha=0.3)
    assert_sum_near(c, exact, magnitude, k)


@every_executor
def test_infinities_and_nan(executor: Executor) -> None:
    """Infinities and NaNs of c propagate, and a finite sum can overflow."""
    row = [math.inf, -math.inf, math.nan, 3.4e38]
    c = torch.tensor([row, row], device=executor.device)
    a = torch.tensor([[0.0], [2.0**15]], device=executor.device).half()
    b = torch.full((1, 4), 2.0**15, device=executor.device).half()
    executor.ops.gemm_accumulate_(c, a, b, alpha=2.0**93)
    expected = torch.tensor([row, [*row[:3], math.inf]], device=executor.device)
    torch.testing.assert_close(c, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda c: c.half(), r"c must be a float tensor, got Half"),
        (lambda c: c.mT.contiguous().mT, r"row-major.*strides \[15, 1, 3\]"),
        (lambda c: c[:1].expand(2, 3, 5), r"row-major.*\[0, 5, 1\]"),
        (lambda c: c.new_zeros(40).as_strided(c.shape, (15, 4, 1)), r"row-major.*\[15, 4, 1\]"),
    ],
    ids=["dtype", "columns", "expanded batch", "overlapping rows"],
)
def test_bad_c(spoil: Callable[[Tensor], Tensor], text: str) -> None:
    """A bad c is an error that names it, and nothing is written."""
    c = spoil(torch.zeros(2, 3, 5))
    with unwritten([c]), pytest.raises(RuntimeError, match=f"gemm_accumulate_: .*{text}"):
        ops.gemm_accumulate_(c, torch.ones(2, 3, 4), torch.ones(4, 5))


def test_copy_on_write() -> None:
    """c gets memory of its own before it is compared with the operands."""
    a = torch.ones(3, 3)
    c = torch._lazy_clone(a)
    ops.gemm_accumulate_(c, a, a)
    assert c.eq(4).all() and a.eq(1).all()
