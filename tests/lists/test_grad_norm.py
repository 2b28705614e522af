"""Test amp_ext::grad_norm: rounding of the norm, equal bits in every run, overflow flag."""

import math

import pytest
import torch

import reference
from amp_ext import ops
from cases import FLOATS, SIZES, assert_same, random, threads, unwritten
from executors import CUDA, Executor, against_oracle, every_executor
from fake_cuda.recorder import schedule


def tolerance(executor: Executor, elements: int) -> float:
    """Return the allowed relative error of the norm of `elements` numbers.

    Let u = 2**-53 be the unit roundoff of the sum. Each term (g * inv_scale)**2 is off by 3 u at
    most (two products, one of them squared). A sum of n terms of one sign adds at most (n - 1) u in
    any order. Rounding errors of random sign add about sqrt(n) u; 4 times as much is allowed
    (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).

    The CUDA kernel adds up 32 squares at most in fp32, by pairs: a square, its partner and four
    sums are 6 roundings of 2**-24, and squares below 2**-126 are off by 2**-29 of the sum. The root
    halves all this. Expected and actual value are then each rounded to fp32: 2**-24 each. The first
    part is negligible in fp64.
    """
    fp32 = 6 * 2.0**-24 + 2.0**-29 if executor.cuda_kernels else 0.0
    fp64 = (3 + min(elements, 4 * math.sqrt(elements))) * 2.0**-53
    return (fp32 + fp64) / 2 + 2 * 2.0**-24


def norm(
    executor: Executor, grads: list[torch.Tensor], factor: float | None = None
) -> tuple[float, float]:
    """Run the op, assert that it has written no gradient, and return the norm and found_inf."""
    found_inf = executor.scalar(0.0)
    inv_scale = None if factor is None else executor.scalar(factor)
    with unwritten(grads):
        result = executor.ops.grad_norm(grads, found_inf, inv_scale)
    assert (result.dtype, result.shape) == (torch.float32, ())
    assert result.device.type == executor.device.type
    return result.item(), found_inf.item()


@every_executor
@pytest.mark.parametrize("factor", [None, -1 / 3, 1e25, 1e-25])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_the_norm_of_python_floats(
    executor: Executor, dtype: torch.dtype, factor: float | None
) -> None:
    """The norm equals the norm of Python floats, also if fp32 cannot hold the squares."""
    grad = random((70_001,), dtype, executor.device)
    rounded = 1.0 if factor is None else torch.tensor(factor).item()
    expected = math.hypot(*(value * rounded for value in grad.tolist()))
    allowed = tolerance(executor, grad.numel())
    assert norm(executor, [grad], factor)[0] == pytest.approx(expected, rel=allowed, abs=0.0)


@against_oracle
@pytest.mark.parametrize("count", [0, 1, 7, 2000])
@pytest.mark.parametrize("factor", [None, 1 / 3])
def test_norm_of_short_empty_and_long_tensors(
    executor: Executor, count: int, factor: float | None
) -> None:
    """Long tensors have several chunks and blocks."""
    count = executor.length(count)
    sizes = [(0, 1, 97, 16384, 70_001, 0, 16385)[i % 7] if i < 14 else i % 41 for i in range(count)]
    grads = [random((size,), FLOATS[i % 4], executor.device) for i, size in enumerate(sizes)]
    inv_scale = None if factor is None else executor.scalar(factor)
    expected = reference.grad_norm(grads, executor.scalar(0.0), inv_scale).item()
    allowed = tolerance(executor, sum(sizes))
    assert norm(executor, grads, factor)[0] == pytest.approx(expected, rel=allowed, abs=0.0)


@every_executor
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_nothing_times_a_factor_that_is_not_finite(executor: Executor, factor: float) -> None:
    for size in (3, 20_000):
        result, found_inf = norm(executor, [torch.zeros(size, device=executor.device)], factor)
        assert (math.isnan(result), found_inf) == (True, 1.0)


@against_oracle
def test_bitwise_repeatable(executor: Executor) -> None:
    """50 runs, with one thread and with two, give the same bits."""
    grads = [random((size,), FLOATS[i % 4], executor.device) for i, size in enumerate(SIZES * 4)]
    grads += [random((300, 7), torch.float32, executor.device).t() for _ in range(50)]
    inv_scale, results = executor.scalar(1 / 3), []
    for run in executor.some(range(50), 3):
        with threads(1 + run % 2):
            results.append(executor.ops.grad_norm(grads, executor.scalar(0.0), inv_scale))
        assert_same(results[-1], results[0])


@pytest.mark.fake_cuda
def test_no_schedule_changes_a_bit() -> None:
    """Neither the order of blocks and warps nor the number of multiprocessors changes a bit."""
    grads = [random((size,), FLOATS[i % 4], CUDA) for i, size in enumerate(SIZES)]
    results = []
    for seed in range(8):
        with schedule(seed, multiprocessors=(1, 4)[seed // 4]):
            results.append(ops.grad_norm(grads, torch.zeros((), device=CUDA)))
        assert_same(results[-1], results[0])
