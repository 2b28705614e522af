"""Test repeated products: the same bits in every run, and no cached state that leaks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from amp_ext import _C, ops
from cases import FLOATS, assert_all_same, assert_equal, integers, normal
from executors import Executor, every_gemm_executor, gemm_against_oracle
from fake_cuda import recorder
from gemm_cases import every_kind

FP16, BF16, FP32, FP64 = FLOATS
M, N, K = 40, 72, 48


def operands(executor: Executor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return two of each operand:

    parts of one matrix, other addresses, longer rows, columns, no alignment.
    """

    def matrix(rows: int, columns: int, skip: int = 0, more: int = 0) -> Tensor:
        dtype, device = torch.float16, executor.device
        return integers((rows, columns + more + skip), dtype, device)[:, skip : skip + columns]

    for _ in range(2):
        a, b = matrix(M, K), matrix(K, N)
        yield a, b
        yield a[:, :-8], b[:-8]
        yield a[:-8], b[:, :-8]
        yield a[::2], b[:, :-8]
        yield matrix(M, K, more=8), matrix(K, N, more=16)
        yield matrix(K, M).mT, matrix(N, K).mT
        yield matrix(M, K, skip=1), matrix(K, N)
        yield matrix(M, K - 8), matrix(K - 8, N)


@gemm_against_oracle
@every_kind
def test_bitwise_repeatable(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Results and gradients of 6 runs have the same bits, also within an autocast region."""
    a = normal((2, 130, 600), dtypes[0], executor.device).requires_grad_()
    b = normal((257, 600), dtypes[1], executor.device).requires_grad_()
    start, aux = (normal((2, 130, 257), dtype, executor.device) for dtype in (FP32, FP16))

    def results() -> list[Tensor]:
        out, c = ops.gemm(a, b, trans_b=True, out_dtype=FP32), start.clone()
        with torch.no_grad():
            ops.gemm_accumulate_(c, a, b, trans_b=True)
            y, sums = ops.gemm_times_derivative(a, b, aux, trans_b=True, activation="gelu")
        return [out, c, y, sums, *torch.autograd.grad(out, [a, b], start)]

    first = results()
    for run in executor.some(range(6), 2):
        with torch.autocast(executor.device.type, dtype=BF16, enabled=run % 2 == 1):
            assert_all_same(results(), first)


@every_gemm_executor
def test_operands_elsewhere(executor: Executor) -> None:
    kept = list(operands(executor))  # all at once, so that each has an address of its own
    for a, b in (*kept, *reversed(kept)):
        assert_equal(executor.ops.gemm(a, b, out_dtype=FP32), a.double() @ b.double())


@every_gemm_executor
def test_results_elsewhere(executor: Executor) -> None:
    """Products are added in place, to another matrix, or to none."""
    a = integers((M, K), FP16, executor.device)
    b = integers((K, N), FP16, executor.device)
    product = a.double() @ b.double()
    places = [torch.zeros(M, N + more, device=executor.device)[:, :N] for more in (0, 8, 0)]
    sums = [torch.zeros(M, N, dtype=FP64, device=executor.device) for _ in places]
    for _, (place, total) in itertools.product(range(2), zip(places, sums, strict=True)):
        before = place.clone()
        out = executor.ops.gemm(a, b, c=place, out_dtype=FP32)
        assert_equal(place, before.double())
        executor.ops.gemm_accumulate_(place, a, b)
        total += product
        assert_equal(out, total)
        assert_equal(place, total)
        assert_equal(executor.ops.gemm(a, b, out_dtype=FP32), product)
        aux = executor.ops.gemm_with_aux(a, b, activation="relu", out_dtype=FP32)[1]
        assert_equal(aux, product)


@pytest.mark.skipif(not recorder.is_running(), reason="the fake CUDA runtime tells the kernels")
def test_a_plan_in_place_is_not_for_a_sum_elsewhere_cuda() -> None:
    """A cached plan in place is not used elsewhere: in place TMA adds, elsewhere c is read."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's kernel has two ways")
    a = integers((256, 256), FP16, torch.device("cuda"))
    b = integers((256, 512), FP16, torch.device("cuda"))
    c = integers((256, 512), FP32, torch.device("cuda"))
    before, product = c.double(), a.double() @ b.double()
    _C.force_gemm_tile(0)
    try:
        with recorder.recorded() as calls:
            for _ in range(2):
                ops.gemm_accumulate_(c, a, b)
                before += product
                assert_equal(c, before)
                assert_equal(ops.gemm(a, b, c=c, out_dtype=FP32), before + product)
    finally:
        _C.force_gemm_tile(None)
    assert len([name for name in calls.of("launch") if "gemm_sm90" in name]) == 4
