"""Test amp_ext::unscale_: values bit for bit, and the overflow flag, on every executor."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from cases import (
    FLOATS,
    LAYOUTS,
    NON_FINITE,
    SIZES,
    all_bit_patterns,
    assert_all_same,
    assert_same,
    bits,
    copies,
    edges,
    random,
    random_bit_patterns,
    threads,
    whole_and_view,
)
from executors import Executor, against_oracle, every_executor, native

# 1.5 gives products half-way between two 16-bit values, 2**-140 is subnormal.
FACTORS = (1.0, 1.5, 2.0**-16, 1 / 3, -0.7, 0.0, 2.0**-140, 1e30, math.inf, math.nan)


def check_against_oracle(executor: Executor, grads: list[torch.Tensor], factor: float) -> float:
    """Run the op and the oracle on `grads`, compare their writes, and return found_inf."""
    expected = copies(grads)
    found_inf, expected_found_inf = executor.scalar(0.0), executor.scalar(0.0)
    reference.unscale_(expected, expected_found_inf, executor.scalar(factor))
    executor.ops.unscale_(grads, found_inf, executor.scalar(factor))
    assert_all_same(grads, expected)
    assert_same(found_inf, expected_found_inf)
    return found_inf.item()


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_torch(executor: Executor, dtype: torch.dtype) -> None:
    for factor in (1.0, 2.0**-16, 1 / 3, 1e-4):
        expected = [random(shape, dtype, torch.device("cpu")) for shape in [(999,), (), (7, 5)]]
        grads = [grad.to(executor.device, copy=True) for grad in expected]
        found_inf, torch_found_inf = executor.scalar(0.0), torch.tensor(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(
            expected, torch_found_inf, torch.tensor(factor)
        )
        executor.ops.unscale_(grads, found_inf, executor.scalar(factor))
        assert_all_same(grads, expected)
        assert_same(found_inf, torch_found_inf)


@against_oracle
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_patterns(executor: Executor, dtype: torch.dtype) -> None:
    for factor in FACTORS:
        grad = all_bit_patterns(dtype).to(executor.device)
        assert check_against_oracle(executor, [grad], factor) == 1.0


@against_oracle
@pytest.mark.parametrize("factor", [1.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_patterns_in_short_tensors(
    executor: Executor, dtype: torch.dtype, factor: float
) -> None:
    """All 16-bit patterns are unscaled in tensors too short for vector instructions."""
    grads = executor.some(all_bit_patterns(dtype).to(executor.device).split(7), 100)
    expected = copies([torch.cat(grads)])
    reference.unscale_(expected, executor.scalar(0.0), executor.scalar(factor))
    executor.ops.unscale_(grads, executor.scalar(0.0), executor.scalar(factor))
    assert_same(torch.cat(grads), *expected)


@against_oracle
@pytest.mark.parametrize("factor", [1.5, -0.7, 2.0**-140, 1e30, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_bit_patterns(executor: Executor, dtype: torch.dtype, factor: float) -> None:
    grad = random_bit_patterns(300_000, dtype).to(executor.device)
    assert check_against_oracle(executor, [grad], factor) == 1.0


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_factor_of_one_keeps_every_bit(executor: Executor, dtype: torch.dtype) -> None:
    sixteen_bits = dtype.itemsize == 2
    grad = all_bit_patterns(dtype) if sixteen_bits else random_bit_patterns(100_000, dtype)
    grad = grad.to(executor.device)
    before = bits(grad).clone()
    executor.ops.unscale_([grad], executor.scalar(0.0), executor.scalar(1.0))
    assert torch.equal(bits(grad), before), "NaN payloads count here"


@every_executor
@pytest.mark.parametrize(
    ("dtype", "value", "factor", "overflows"),
    [
        (torch.float16, 65504.0, 1.00048828125, True),  # 65536, beyond the largest fp16
        (torch.float16, 65504.0, 1.0001, False),  # rounds back to 65504
        (torch.float32, torch.finfo(torch.float32).max, 1.0000001, True),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max, 1.0000001, False),
        (torch.float64, 1e300, 1e30, True),
        (torch.float64, 1e300, 0.5, False),  # finite in fp64, though not in fp32
        (torch.float32, 0.0, math.inf, True),
    ],
    ids=str,
)
def test_product_is_judged_after_rounding(
    executor: Executor, dtype: torch.dtype, value: float, factor: float, overflows: bool
) -> None:
    grad = torch.full((37,), value, dtype=dtype, device=executor.device)
    found_inf = executor.scalar(0.0)
    executor.ops.unscale_([grad], found_inf, executor.scalar(factor))
    assert found_inf.item() == float(overflows)
    assert bool(grad.isfinite().all()) is not overflows


@against_oracle
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finds_a_bad_value_at_every_edge(
    executor: Executor, dtype: torch.dtype, offset: int
) -> None:
    """A bad value is found at every edge, and only the elements of the view are unscaled."""
    inv_scale = executor.scalar(0.5)
    for size in executor.some(SIZES):
        whole = torch.full((offset + size + 5,), 4.0, dtype=dtype, device=executor.device)
        grad = whole[offset : offset + size]
        expected = torch.full_like(whole, 4.0)
        expected[offset : offset + size] = 2.0
        for position in executor.some(edges(size)):
            value = NON_FINITE[position % 3]
            whole.fill_(4.0)
            grad[position] = value
            found_inf = executor.scalar(0.0)
            executor.ops.unscale_([grad], found_inf, inv_scale)
            assert found_inf.item() == 1.0, (size, position, value)
            assert not grad[position].isfinite(), (size, position, value)
            grad[position] = 2.0
            assert_same(whole, expected)


@against_oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(executor: Executor, layout: str) -> None:
    for dtype in FLOATS:
        whole, grad = whole_and_view(layout, dtype, executor.device)
        expected_whole, expected = copies([whole])[0], copies([grad])[0]
        expected_whole.set_(expected.untyped_storage(), 0, whole.shape, whole.stride())
        reference.unscale_([expected], executor.scalar(0.0), executor.scalar(1 / 3))
        executor.ops.unscale_([grad], executor.scalar(0.0), executor.scalar(1 / 3))
        assert_same(grad, expected)
        assert_same(whole, expected_whole)


@against_oracle
@pytest.mark.parametrize("count", [1, 3, 2000])
@pytest.mark.parametrize("bad", [None, 0, -1], ids=["finite", "first-bad", "last-bad"])
def test_lists_of_mixed_dtypes(executor: Executor, count: int, bad: int | None) -> None:
    sizes = [1 + 7 * i % 97 for i in range(executor.length(count))]
    grads = [random((size,), FLOATS[i % 4], executor.device) for i, size in enumerate(sizes)]
    if bad is not None:
        grads[bad][-1] = math.inf
    found_inf = check_against_oracle(executor, grads, 1 / 3)
    assert found_inf == float(bad is not None)


@against_oracle
def test_every_layout_in_one_list(executor: Executor) -> None:
    grads = [whole_and_view(name, dt, executor.device)[1] for name in LAYOUTS for dt in FLOATS]
    assert check_against_oracle(executor, grads, 2.0**-10) == 0.0


@every_executor
def test_empty_tensors_anywhere(executor: Executor) -> None:
    empty = torch.empty(0, device=executor.device)
    full = torch.full((3,), 8.0, device=executor.device)
    grads = [empty, empty.half(), full, torch.empty(0, 4, device=executor.device), empty]
    found_inf = executor.scalar(0.0)
    executor.ops.unscale_(grads, found_inf, executor.scalar(0.25))
    assert full.tolist() == [2.0, 2.0, 2.0]
    assert found_inf.item() == 0.0


@every_executor
@pytest.mark.parametrize("already", [0.0, 1.0])
def test_empty_list_writes_nothing(executor: Executor, already: float) -> None:
    found_inf = executor.scalar(already)
    executor.ops.unscale_([], found_inf, executor.scalar(0.25))
    assert found_inf.item() == already


@every_executor
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_found_inf_is_set_to_one_and_never_cleared(
    executor: Executor, shape: tuple[int, ...]
) -> None:
    found_inf = torch.zeros(shape, device=executor.device)
    inv_scale = torch.full(shape, 0.5, device=executor.device)
    good = [torch.ones(5, device=executor.device)]
    bad = [torch.full((5,), math.inf, device=executor.device)]
    for grads, expected in ((good, 0.0), (bad, 1.0), (good, 1.0), (bad, 1.0)):
        executor.ops.unscale_(grads, found_inf, inv_scale)
        assert found_inf.item() == expected


@against_oracle
def test_number_of_threads_changes_nothing(executor: Executor) -> None:
    grads = [random((size,), dtype, executor.device) for size in SIZES for dtype in FLOATS]
    again = copies(grads)
    for count, tensors in ((1, grads), (2, again)):
        with threads(count):
            executor.ops.unscale_(tensors, executor.scalar(0.0), executor.scalar(1 / 3))
    assert_all_same(grads, again)


# ---- clipping ----------------------------------------------------------------------------------

UNCLIPPED = [(None, None), (3.0, None), (3.0, math.inf), (3.0, 1e300), (3.0, 3.1)]


def clip(
    executor: Executor,
    grads: list[torch.Tensor],
    norm: float,
    max_norm: float | None,
    factor: float = 1.0,
    already: float = 0.0,
) -> float:
    """Run the op with a norm and return found_inf."""
    found_inf = executor.scalar(already)
    executor.ops.unscale_(
        grads, found_inf, executor.scalar(factor), norm=executor.scalar(norm), max_norm=max_norm
    )
    return found_inf.item()


@every_executor
def test_clips_as_torch(executor: Executor) -> None:
    """Clipping equals torch's, bit for bit: ones times the factor are the factor."""
    norms = [0.0, 1e-30, 1e-7, 1.0, 3e38, *torch.randn(40).mul(4).exp().tolist()]
    limits = [0.0, 1e-40, 1e-3, 0.1, 1.0, 1e38, math.inf, *torch.randn(20).exp().tolist()]
    for norm in executor.some(norms, 12):
        for max_norm in executor.some(limits, 10):
            expected = torch.nn.Parameter(torch.ones(3))
            expected.grad = torch.ones(3)
            torch.nn.utils.clip_grads_with_norm_([expected], max_norm, torch.tensor(norm))
            grad = torch.ones(3, device=executor.device)
            assert clip(executor, [grad], norm, max_norm) == 0.0
            assert_same(grad, expected.grad)


@every_executor
@pytest.mark.parametrize("scale", [2.0**127, 2.0**120, 1000.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unscales_and_clips_as_torch(executor: Executor, dtype: torch.dtype, scale: float) -> None:
    """Unscaling and clipping equal torch's two passes bit for bit.

    The product of the factors may be subnormal or 0.
    """
    scaled = torch.empty(999, dtype=dtype).uniform_(-1, 1) * scale
    inv_scale = torch.tensor(scale).reciprocal()
    for max_norm in (1e-6, 1e-3, 1.0, 20.0):
        expected = torch.nn.Parameter(torch.ones_like(scaled))
        expected.grad = scaled * inv_scale
        norm = expected.grad.norm().float()
        torch.nn.utils.clip_grads_with_norm_([expected], max_norm, norm)
        grad = scaled.to(executor.device, copy=True)
        assert clip(executor, [grad], norm.item(), max_norm, inv_scale.item()) == 0.0
        assert grad.count_nonzero() == grad.numel()
        assert_same(grad, expected.grad.to(executor.device))


@every_executor
@pytest.mark.parametrize(("norm", "max_norm"), UNCLIPPED, ids=str)
def test_norm_within_the_limit_changes_nothing(
    executor: Executor, norm: float | None, max_norm: float | None
) -> None:
    grads = [random((999,), dtype, executor.device) for dtype in FLOATS]
    expected = copies(grads)
    executor.ops.unscale_(expected, executor.scalar(0.0), executor.scalar(1 / 3))
    given = None if norm is None else executor.scalar(norm)
    executor.ops.unscale_(
        grads, executor.scalar(0.0), executor.scalar(1 / 3), norm=given, max_norm=max_norm
    )
    assert_all_same(grads, expected)


@against_oracle
@pytest.mark.parametrize("count", [1, 3, 2000])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_clips_any_list(executor: Executor, count: int, factor: float) -> None:
    """The clip coefficient is rounded to fp32 before it meets a product, in fp64 too."""
    sizes = [1 + 7 * i % 97 for i in range(executor.length(count))]
    grads = [random((size,), FLOATS[i % 4], executor.device) for i, size in enumerate(sizes)]
    for max_norm in executor.some([0.0, 1e-3, 1 / 7, 0.9, 5.0], 3):
        expected, actual = copies(grads), copies(grads)
        found_inf = executor.scalar(0.0)
        norm = reference.grad_norm(grads, found_inf, executor.scalar(factor))
        assert clip(executor, actual, norm.item(), max_norm, factor) == 0.0
        reference.unscale_(
            expected, found_inf, executor.scalar(factor), norm=norm, max_norm=max_norm
        )
        assert_all_same(actual, expected)


@every_executor
@pytest.mark.parametrize(("norm", "max_norm"), [*zip(NON_FINITE, (1.0, None, 0.0), strict=True)])
@pytest.mark.parametrize("count", [0, 1, 20, 1500])
def test_norm_that_is_not_finite(
    executor: Executor, count: int, max_norm: float | None, norm: float
) -> None:
    """A norm that is not finite is an overflow, and gradients stay unchanged."""
    grads = [
        random((3000,), FLOATS[i % 4], executor.device)[i % 4 :]
        for i in range(executor.length(count))
    ]
    grads += [torch.empty(0, device=executor.device)]
    before = copies(grads)
    assert clip(executor, grads, norm, max_norm, 0.5) == 1.0
    assert_all_same(grads, before)


@every_executor
@pytest.mark.parametrize("max_norm", [None, 4.0])
def test_clipping_by_one_leaves_gradients_alone(executor: Executor, max_norm: float | None) -> None:
    """A coefficient of 1 leaves gradients unread.

    A finite norm, here a wrong one, vouches for them.
    """
    grads = [torch.full((40,), value, device=executor.device) for value in (2.0, *NON_FINITE)]
    grads[0][0] = 2.0**-149
    before = [bits(grad).clone() for grad in grads]
    assert clip(executor, grads, 2.0, max_norm) == 0.0
    for grad, was in zip(grads, before, strict=True):
        assert torch.equal(bits(grad), was)


@every_executor
def test_found_inf_does_not_stop_the_clipping(executor: Executor) -> None:
    """found_inf does not stop the clipping: other blocks may set it meanwhile."""
    grads = [torch.full((9,), 8.0, device=executor.device) for _ in range(40)]
    assert clip(executor, grads, 2.0 - 1e-6, 1.0, 0.5, already=1.0) == 1.0
    assert all(grad.tolist() == [2.0] * 9 for grad in grads)


@every_executor
@pytest.mark.parametrize(("max_norm", "overflows"), [(1e6, True), (1.5e5, False)])
def test_clipped_product_is_judged_after_rounding(
    executor: Executor, max_norm: float, overflows: bool
) -> None:
    grad = torch.full((9,), 60000.0, dtype=torch.float16, device=executor.device)
    assert clip(executor, [grad], 360000.0, max_norm, 2.0) == float(overflows)
    assert bool(grad.isfinite().all()) is not overflows


@pytest.mark.full
@native
def test_more_than_2_to_the_31_elements(executor: Executor) -> None:
    grad = torch.ones(2**31 + 5, dtype=torch.bfloat16, device=executor.device)
    grad[-1] = math.inf
    found_inf = executor.scalar(0.0)
    executor.ops.unscale_([grad], found_inf, executor.scalar(0.5))
    assert found_inf.item() == 1.0
    assert grad[-2].item() == grad[0].item() == 0.5
    assert grad[:-1].max().item() == grad[:-1].min().item() == 0.5
