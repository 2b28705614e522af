"""Test that amp_ext::check_finite finds every inf and NaN, and writes no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from cases import (
    FLOATS,
    LAYOUTS,
    NON_FINITE,
    OVERLAPPING,
    SIZES,
    all_bit_patterns,
    edges,
    random,
    random_bit_patterns,
    unwritten,
    whole_and_view,
)
from executors import Executor, against_oracle, every_executor


def check(executor: Executor, grads: list[torch.Tensor]) -> float:
    """Run the op, assert that it has written no gradient, and return found_inf."""
    found_inf = executor.scalar(0.0)
    with unwritten(grads):
        executor.ops.check_finite(grads, found_inf)
    return found_inf.item()


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_judges_every_bit_pattern(executor: Executor, dtype: torch.dtype) -> None:
    """All finite values together pass, and each inf and each NaN is found alone."""
    sixteen_bits = dtype.itemsize == 2
    values = all_bit_patterns(dtype) if sixteen_bits else random_bit_patterns(200_000, dtype)
    values = values.to(executor.device)
    finite = values.isfinite()
    assert check(executor, [values[finite]]) == 0.0
    for index, bad in enumerate(values[~finite]):
        found_inf = executor.scalar(0.0)
        executor.ops.check_finite([bad], found_inf)
        assert found_inf.item() == 1.0, (index, bad)


@against_oracle
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finds_a_bad_value_at_every_edge(
    executor: Executor, dtype: torch.dtype, offset: int
) -> None:
    """A bad value is found at every edge of the view, and ignored right outside."""
    for size in executor.some(SIZES):
        whole = torch.full((offset + size + 5,), math.nan, dtype=dtype, device=executor.device)
        grad = whole[offset : offset + size]
        grad.fill_(1.0)
        assert check(executor, [grad]) == 0.0, size
        for position in executor.some(edges(size)):
            value = NON_FINITE[position % 3]
            grad[position] = value
            found_inf = executor.scalar(0.0)
            executor.ops.check_finite([grad], found_inf)
            assert found_inf.item() == 1.0, (size, position, value)
            grad[position] = 1.0


@every_executor
@pytest.mark.parametrize("layout", LAYOUTS | OVERLAPPING)
def test_layouts(executor: Executor, layout: str) -> None:
    """Every layout is legal, overlapping memory too; only the elements of the view count."""
    for dtype in FLOATS:
        whole, grad = whole_and_view(layout, dtype, executor.device)
        values = grad.clone()
        whole.fill_(math.inf)
        if layout not in OVERLAPPING:
            grad.copy_(values)
        else:
            whole.fill_(1.0)
        assert check(executor, [grad]) == 0.0
        if grad.numel():
            grad[(-1,) * grad.dim()] = math.nan
            assert check(executor, [grad]) == 1.0


@every_executor
@pytest.mark.parametrize("bad", [0, 1000, 1999])
def test_finds_one_bad_tensor_of_many(executor: Executor, bad: int) -> None:
    count = executor.length(2000)
    grads = [random((1 + i % 50,), FLOATS[i % 4], executor.device) for i in range(count)]
    grads[bad * (count - 1) // 1999][-1] = math.inf
    assert check(executor, grads) == 1.0


@every_executor
def test_long_list_with_all_elements_at_its_end(executor: Executor) -> None:
    """A long list with all elements at its end is searched within the table."""
    count, few = executor.length(1400), 20
    grads = [torch.empty(0, device=executor.device)] * (count - few)
    grads += [random((5,), FLOATS[i % 4], executor.device) for i in range(few)]
    assert check(executor, grads) == 0.0
    grads[-1][-1] = math.inf
    assert check(executor, grads) == 1.0


@every_executor
def test_nothing_to_check(executor: Executor) -> None:
    assert check(executor, []) == 0.0
    assert check(executor, [torch.empty(0, 3, device=executor.device)] * 3) == 0.0


@every_executor
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_found_inf_is_set_to_one_and_never_cleared(
    executor: Executor, shape: tuple[int, ...]
) -> None:
    found_inf = torch.zeros(shape, device=executor.device)
    good = [torch.ones(5, device=executor.device)]
    bad = [*good, torch.full((5,), math.inf, device=executor.device)]
    for grads, flag in ((good, 0.0), (bad, 1.0), (good, 1.0)):
        executor.ops.check_finite(grads, found_inf)
        assert found_inf.item() == flag
