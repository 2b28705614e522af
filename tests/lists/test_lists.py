"""Test what ops on lists share: memory, lists, and the overflow flag."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cases import (
    FLOATS,
    LAYOUTS,
    NON_FINITE,
    OVERLAPPING,
    SIZES,
    assert_all_same,
    assert_same,
    copies,
    edges,
    patterns,
    random,
    surroundings,
    whole_and_view,
)
from executors import Executor, against_oracle, every_executor

OPS = ("unscale_", "check_finite", "grad_norm")
every_op = pytest.mark.parametrize("op", OPS)
with_casts = pytest.mark.parametrize("op", [*OPS, "cast_"])


def call(by: Any, op: str, grads: list[Tensor], found_inf: Tensor, factor: Tensor) -> Any:
    if op == "cast_":
        outputs = [torch.zeros_like(x, dtype=FLOATS[i // 4 % 4]) for i, x in enumerate(grads)]
        by.cast_(outputs, grads)
        by.check_finite(outputs, found_inf)
        return outputs
    return getattr(by, op)(grads, found_inf, *[factor] * (op != "check_finite"))


def check(executor: Executor, op: str, grads: list[Tensor]) -> float:
    """Compare the op's writes, and the memory around them, with the oracle's; return found_inf."""
    factor, expected = executor.scalar(1 / 3), copies(grads)
    found_inf, expected_found_inf = executor.scalar(0.0), executor.scalar(0.0)
    result = call(executor.ops, op, grads, found_inf, factor)
    exact = call(reference, op, expected, expected_found_inf, factor)
    assert_all_same(map(surroundings, grads), map(surroundings, expected))
    assert_same(found_inf, expected_found_inf)
    if op == "cast_":
        assert_all_same(result, exact)
    if op == "grad_norm":
        torch.testing.assert_close(result, exact, rtol=2.0**-21, atol=0, equal_nan=True)
    return found_inf.item()


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern_is_judged(executor: Executor, dtype: torch.dtype) -> None:
    """All finite values together pass, and each inf and each NaN is found alone."""
    values = patterns(dtype, executor.device)
    finite = values.isfinite()
    assert check(executor, "check_finite", [values[finite]]) == 0.0
    for index, bad in enumerate(values[~finite]):
        found_inf = executor.scalar(0.0)
        executor.ops.check_finite([bad], found_inf)
        assert found_inf.item() == 1.0, (index, bad)


@against_oracle
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_op
def test_every_edge(executor: Executor, op: str, dtype: torch.dtype, offset: int) -> None:
    """A number or a bad value counts once at every edge of a view, and not right outside."""
    half = executor.scalar(0.5)
    for size in executor.some(SIZES):
        whole = torch.full((offset + size + 5,), math.nan, dtype=dtype, device=executor.device)
        grad = whole[offset : offset + size]
        for position in executor.some(edges(size)):
            grad.zero_()
            grad[position] = -4.0
            found_inf = executor.scalar(0.0)
            result = call(executor.ops, op, [grad], found_inf, half)
            number = result.item() if op == "grad_norm" else grad[position].item()
            assert number == {"unscale_": -2.0, "check_finite": -4.0, "grad_norm": 2.0}[op]
            assert (grad.count_nonzero().item(), found_inf.item()) == (1, 0.0), (size, position)
            value = NON_FINITE[position % 3]
            grad[position] = value
            result = call(executor.ops, op, [grad], found_inf, half)
            assert found_inf.item() == 1.0, (size, position, value)
            assert result is None or not result.isfinite(), (size, position, value)
        assert whole.isnan().sum() - grad.isnan().sum() == offset + 5
        whole.fill_(4.0)
        call(executor.ops, op, [grad], executor.scalar(0.0), half)
        assert whole[:offset].eq(4.0).all() and whole[offset + size :].eq(4.0).all()


@against_oracle
@pytest.mark.parametrize("layout", LAYOUTS | OVERLAPPING)
@every_op
def test_layouts(executor: Executor, op: str, layout: str) -> None:
    """Every layout is legal, for reading overlapping memory too."""
    if op == "unscale_" and layout in OVERLAPPING:
        return
    for dtype in FLOATS:
        whole, grad = whole_and_view(layout, dtype, executor.device)
        if layout not in OVERLAPPING:
            values = grad.clone()
            whole.fill_(math.inf)
            grad.copy_(values)
        assert check(executor, op, [grad]) == 0.0
        if grad.numel():
            grad[(-1,) * grad.dim()] = math.nan
            assert check(executor, op, [grad]) == 1.0


@against_oracle
@pytest.mark.parametrize("count", [1, 2000])
@pytest.mark.parametrize("bad", [None, 0.0, 0.5, 1.0])
@with_casts
def test_lists_of_mixed_dtypes(executor: Executor, op: str, count: int, bad: float | None) -> None:
    """A bad element of the first tensor counts, and one of the middle or the last tensor."""
    sizes = [1 + 7 * i % 97 for i in range(executor.length(count))]
    grads = [random((size,), FLOATS[i % 4], executor.device) for i, size in enumerate(sizes)]
    if bad is not None:
        grads[round(bad * (len(grads) - 1))][-1] = math.inf
    assert check(executor, op, grads) == float(bad is not None)


@every_executor
@with_casts
def test_empty_tensors_anywhere(executor: Executor, op: str) -> None:
    """Empty tensors take no part, also where a long list has all elements at its end."""
    empty, few = torch.empty(0, 3, device=executor.device), 20
    assert check(executor, op, []) == 0.0
    assert check(executor, op, [empty.clone() for _ in range(3)]) == 0.0
    grads = [empty.clone() for _ in range(executor.length(1400) - few)]
    grads += [random((5,), FLOATS[i % 4], executor.device) for i in range(few)]
    grads.append(empty.half())
    assert check(executor, op, grads) == 0.0
    grads[-2][-1] = math.inf
    assert check(executor, op, grads) == 1.0


@every_executor
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@every_op
def test_found_inf_is_set_to_one_and_never_cleared(
    executor: Executor, op: str, shape: tuple[int, ...]
) -> None:
    found_inf, one = (torch.full(shape, x, device=executor.device) for x in (0.0, 1.0))
    good, bad = (torch.full((4,), x, device=executor.device) for x in (1.0, math.inf))
    for grad, flag in ((good, 0.0), (bad, 1.0), (good, 1.0)):
        result = call(executor.ops, op, [grad], found_inf, one)
        assert found_inf.item() == flag
    if op == "grad_norm":
        assert (result.shape, result.item()) == ((), 2.0)
