"""Test numerics of amp_ext::gemm: overflow, rounding, infinities, aliases, repeated runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import FLOATS, assert_all_same, assert_equal, integers, normal, stored
from executors import Executor, against_oracle, every_gemm_executor, gemm_against_oracle
from gemm_cases import every_kind

FP16, BF16, FP32, FP64 = FLOATS


@every_gemm_executor
@pytest.mark.parametrize("trans", [(False, False), (True, True)], ids=["nn", "tt"])
@every_kind
def test_infinities_and_nans_spread_as_in_ieee(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], trans: tuple[bool, bool]
) -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([[1.0, 2.0], [inf, 1.0], [-inf, 1.0], [nan, 1.0], [inf, -inf]])
    b = torch.tensor([[1.0, 0.0, -1.0, nan], [3.0, 5.0, 1.0, 1.0]])
    exact = (a.double()[:, :, None] * b.double()).sum(1)
    a = stored(a.to(dtypes[0]).to(executor.device), trans[0])
    b = stored(b.to(dtypes[1]).to(executor.device), trans[1])
    assert_equal(executor.ops.gemm(a, b, trans_a=trans[0], trans_b=trans[1]), exact)


@every_gemm_executor
@pytest.mark.parametrize("k", [8, 512], ids=["small", "large"])
@pytest.mark.parametrize("factor", [-0.0, 1e-46], ids=str)
@pytest.mark.parametrize("dtype", [FP16, FP32, FP64], ids=str)
def test_nan_times_a_factor_of_zero(
    executor: Executor, dtype: torch.dtype, factor: float, k: int
) -> None:
    """NaN times a factor of 0 is NaN, also for a factor of 1e-46, 0 in fp32.

    A library may compute large products, and may skip factors of 0.
    """
    a, b = (torch.ones(size, dtype=dtype, device=executor.device) for size in ((1, k), (k, k)))
    c = torch.ones(1, k, dtype=dtype, device=executor.device)
    bad_b, bad_c = b.clone(), c.clone()
    bad_b[0, 0], bad_c[0, 0] = math.nan, math.nan
    bad_b[1, 1], bad_c[0, 1] = math.inf, math.inf
    times_inf = math.inf if dtype == FP64 and factor else math.nan

    def row(value: float) -> Tensor:
        return torch.tensor([[math.nan, times_inf] + (k - 2) * [value]], dtype=FP64)

    assert_equal(executor.ops.gemm(a, bad_b, alpha=factor), row(k * factor if dtype == FP64 else 0))
    assert_equal(executor.ops.gemm(a, bad_b, alpha=factor, c=c), row(1.0))
    total = torch.ones(1, k, device=executor.device)
    executor.ops.gemm_accumulate_(total, a, bad_b, alpha=factor)
    assert_equal(total, row(1.0))
    if factor:  # with a beta of 0, c is not read
        assert_equal(executor.ops.gemm(a, b, c=bad_c, beta=factor), row(k))


@against_oracle
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_factor_beyond_fp32(executor: Executor, name: str) -> None:
    a = torch.ones(2, 3, device=executor.device)
    with pytest.raises(RuntimeError, match=f"{name} must be at most 3.40282e\\+38 in magnitude"):
        executor.ops.gemm(a, a.mT, c=a[:, :1], **{name: -1e39})
    assert executor.ops.gemm(a.double(), a.double().mT, **{name: 1e39}).isfinite().all()


@every_gemm_executor
def test_sums_beyond_fp16_are_rounded_once_at_the_end(executor: Executor) -> None:
    a = torch.full((1, 2), 240.0, device=executor.device).half()
    b = torch.full((2, 1), 256.0, device=executor.device).half()
    bias = torch.full((1,), -100_000.0, device=executor.device)
    assert executor.ops.gemm(a, b).item() == math.inf
    assert executor.ops.gemm(a, b, alpha=-1.0).item() == -math.inf
    assert executor.ops.gemm(a, b, out_dtype=FP32).item() == 122_880.0
    assert executor.ops.gemm(a, b, out_dtype=BF16).item() == 122_880.0
    assert executor.ops.gemm(a, b, alpha=0.5).item() == 61_440.0
    assert executor.ops.gemm(a, b, bias=bias).item() == 22_880.0
    assert executor.ops.gemm(a, b, c=bias).item() == 22_880.0
    ones = torch.ones(3, 1, device=executor.device).half()
    there_and_back = torch.tensor([[60_000.0, 60_000.0, -60_000.0]], device=executor.device).half()
    assert executor.ops.gemm(there_and_back, ones).item() == 60_000.0


@every_gemm_executor
@pytest.mark.parametrize(
    ("dtype", "dot", "rounded"),
    [
        (FP16, [2048.0, 1.0], 2048.0),
        (FP16, [2050.0, 1.0], 2052.0),
        (FP16, [2048.0, 1.0, 2.0**-10], 2050.0),
        (FP16, [65504.0, 15.0], 65504.0),
        (FP16, [65504.0, 16.0], math.inf),
        (BF16, [256.0, 1.0], 256.0),
        (BF16, [258.0, 1.0], 260.0),
        (BF16, [256.0, 1.0, 2.0**-10], 258.0),
        (FP32, [2.0**24, 1.0], 2.0**24),
    ],
)
def test_rounds_to_nearest_even(
    executor: Executor, dtype: torch.dtype, dot: list[float], rounded: float
) -> None:
    """Results round to nearest even; each exact sum lies between two neighbours in the dtype."""
    a = torch.tensor([dot], device=executor.device).to(dtype)
    b = torch.ones(len(dot), 1, dtype=dtype, device=executor.device)
    assert executor.ops.gemm(a, b).item() == rounded


@every_gemm_executor
def test_fp16_subnormals_are_kept(executor: Executor) -> None:
    every = torch.arange(1, 1024, dtype=torch.int16).view(FP16)
    subnormals = every.view(-1, 1).to(executor.device)
    for factor in (1.0, 2.0, 1024.0, -1.0):
        b = torch.full((1, 1), factor, device=executor.device).half()
        assert_equal(executor.ops.gemm(subnormals, b), factor * subnormals.double())
    small = torch.full((1, 1), 2.0**-12, device=executor.device).half()
    assert executor.ops.gemm(small, small).item() == 2.0**-24


@every_gemm_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overlapping_and_scattered_operands(executor: Executor, dtype: torch.dtype) -> None:
    """Operands may overlap: sliding windows, one repeated element, reversed order of strides."""
    values = integers((200,), dtype, executor.device)
    windows = values.unfold(0, 40, 1)[:50]
    same = values[:1].expand(40, 20)
    scattered = values[:180].view(3, 3, 20).permute(2, 1, 0)[:, ::2, :1].squeeze(-1)
    for a, b in (
        (windows, same),
        (windows, values.unfold(0, 5, 3)[:40]),
        (scattered.mT, same[:20]),
    ):
        assert_equal(executor.ops.gemm(a, b), a.double() @ b.double())


@gemm_against_oracle
@every_kind
def test_bitwise_repeatable(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Results and gradients of 6 runs have the same bits, also within an autocast region."""
    a = normal((2, 130, 600), dtypes[0], executor.device).requires_grad_()
    b = normal((257, 600), dtypes[1], executor.device).requires_grad_()
    start = normal((2, 130, 257), FP32, executor.device)

    def results() -> list[Tensor]:
        out, c = ops.gemm(a, b, trans_b=True, out_dtype=FP32), start.clone()
        with torch.no_grad():
            ops.gemm_accumulate_(c, a, b, trans_b=True)
        return [out, c, *torch.autograd.grad(out, [a, b], start)]

    first = results()
    for run in executor.some(range(6), 2):
        with torch.autocast(executor.device.type, dtype=BF16, enabled=run % 2 == 1):
            assert_all_same(results(), first)
