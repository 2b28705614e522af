"""Test amp_ext::gemm on a CPU with large products: several blocks, and few rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_ext import _C, ops
from cases import integers, threads

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
DIRECT, BLOCKS = 1, 2  # variants of the CPU backend
PARTS = (64 + 5, 2 * 2048 + 7)  # m and n: a little over one or two parts


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in FP32. Sums of products of integers up to 3 are exact in any order."""
    return (a.double() @ b.double()).float()


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("k", [2 * 512 + 3, 515])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_parts(dtype: torch.dtype, k: int, trans_a: bool, trans_b: bool) -> None:
    m, n = PARTS
    a, b = integers((m, k), dtype, CPU), integers((k, n), dtype, CPU)
    stored_a = a.t().contiguous() if trans_a else a
    stored_b = b.t().contiguous() if trans_b else b
    options = {"trans_a": trans_a, "trans_b": trans_b}
    assert torch.equal(ops.gemm(stored_a, stored_b, out_dtype=FP32, **options), product(a, b))

    total = integers((m, n), FP32, CPU)
    expected = total + product(a, b)
    ops.gemm_accumulate_(total, stored_a, stored_b, **options)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize(
    ("dtype", "variant"), [(FP16, DIRECT), (BF16, DIRECT), (BF16, BLOCKS)], ids=str
)
def test_ways_that_a_table_chooses(
    dtype: torch.dtype, variant: int, trans_a: bool, trans_b: bool
) -> None:
    """MKL multiplies 16-bit operands in place, and oneDNN BF16 operands in packed blocks."""
    m, n, k = 137, 170, 1023
    a, b = integers((m, 2 * k), dtype, CPU)[:, :k], integers((k, n), dtype, CPU)
    a = a.t().contiguous().t() if trans_a else a
    b = b.t().contiguous().t() if trans_b else b
    assert _C.start_noting()
    ops.gemm(a, b)
    (noted,) = _C.stop_noting()
    served = torch.backends.mkl.is_available() if variant == DIRECT else _C.multiplies(BF16)
    assert (("cpu", variant) in noted.candidates(triton=False)) == served
    if not served:
        pytest.skip("needs MKL in torch" if variant == DIRECT else "needs BF16 instructions")
    before = _C.gemm_mode()
    try:
        _C.set_gemm_mode("auto")
        _C.set_measured("cpu", [(noted.key, "cpu", variant, "a test says so")])
        assert _C.gemm_choice(a, b) == ("cpu", "a test says so")
        for count in (1, 3, 7):
            with threads(count):
                assert torch.equal(ops.gemm(a, b), product(a, b).to(dtype)), count
    finally:
        _C.set_measured("cpu", [])
        _C.set_gemm_mode(before)


def test_oneDNN_may_be_turned_off() -> None:
    """If oneDNN is off, torch multiplies 16-bit types by its own loops."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert not _C.multiplies(BF16)


def test_operands_with_holes() -> None:
    m, n, k = 40, 70, 2048 + 7
    a, b = integers((k, 2 * m), BF16, CPU)[:, ::2].t(), integers((k, 3 * n), BF16, CPU)[:, ::3]
    c = integers((m, n), FP32, CPU)
    result = ops.gemm(a, b, c=c, alpha=0.5, out_dtype=FP32)
    assert torch.equal(result, 0.5 * product(a, b) + c)


def test_an_odd_k_takes_nothing_of_the_next_row() -> None:
    """An odd k reads no element of the next row.

    BF16 is multiplied in pairs, and NaN times a padding 0 would be NaN.
    """
    a, b = integers((70, 64), BF16, CPU), integers((64, 90), BF16, CPU)
    expected = product(a[:, :63], b[:63])
    a[:, 63], b[63] = torch.nan, torch.nan
    assert torch.equal(ops.gemm(a[:, :63], b[:63], out_dtype=FP32), expected)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_few_rows(dtype: torch.dtype, m: int, trans_b: bool) -> None:
    """A thread holds the sums of 128 columns or more; 611 steps fill no vector."""
    n, k = 1100, 611
    a, b = integers((2, m, k), dtype, CPU), integers((2, k, n), dtype, CPU)
    stored = b.mT.contiguous() if trans_b else b
    bias = integers((n,), FP32, CPU)
    result = ops.gemm(a, stored, trans_b=trans_b, bias=bias, out_dtype=FP32)
    assert torch.equal(result, product(a, b) + bias)

    total = integers((m, n), FP32, CPU)
    expected = total + product(a, b).sum(0)
    ops.gemm_accumulate_(total, a, stored, trans_b=trans_b, sum_batch=True)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("n", [1, 15])
def test_few_columns(n: int, holes: bool) -> None:
    """A single dense column has strides of 1 in both dimensions, and 15 columns fill no vector."""
    a, b = integers((1, 9001), FP16, CPU), integers((9001, n + holes), FP16, CPU)[:, :n]
    assert torch.equal(ops.gemm(a, b, out_dtype=FP32), product(a, b))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_few_rows_by_any_number_of_threads(m: int, trans_b: bool) -> None:
    """Few rows give equal results for any number of threads, though each cuts the columns anew."""
    a, b = torch.randn(m, 611).half(), torch.randn(611, 1100).half()
    stored = b.t().contiguous() if trans_b else b
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(ops.gemm(a, stored, trans_b=trans_b, out_dtype=FP32))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_a_batch_by_any_number_of_threads(dtype: torch.dtype) -> None:
    """Threads share the batch of small products, each with a workspace of its own."""
    a, b = integers((50, 31, 33), dtype, CPU), integers((50, 33, 29), dtype, CPU)
    bias = integers((29,), FP32, CPU)
    for count in (1, 2, 3):
        with threads(count):
            result = ops.gemm(a, b, bias=bias, out_dtype=FP32)
        assert torch.equal(result, product(a, b) + bias), count


@pytest.mark.parametrize("adds", [False, True])
def test_a_long_sum_by_any_number_of_threads(adds: bool) -> None:
    """Threads add up a share of k each; more threads than shares of use have nothing to do."""
    a, b = torch.randint(-2, 3, (70, 1300)).half(), torch.randint(-2, 3, (1300, 33)).half()
    for count in (1, 2, 3, 40):
        c = torch.ones(70, 33)
        with threads(count):
            if adds:
                ops.gemm_accumulate_(c, a, b)
            else:
                c.add_(ops.gemm(a, b, out_dtype=FP32))
        assert torch.equal(c, 1 + a.float() @ b.float()), count


@pytest.mark.parametrize("m", [4, 8, 64])
def test_a_sum_of_no_products_is_zero(m: int) -> None:
    a, b = integers((m, 0), FP16, CPU), integers((0, 40000), FP16, CPU)
    assert not ops.gemm(a, b, alpha=2, out_dtype=FP32).any()
    assert ops.gemm(a, b, alpha=torch.inf, out_dtype=FP32).isnan().all()


@pytest.mark.parametrize("alpha", [torch.nan, torch.inf, -torch.inf, 0.0, 0.5])
@pytest.mark.parametrize("shape", [(5, 7, 3), (3, 700, 611), (300, 130, 200)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_alpha_scales_the_sum(
    dtype: torch.dtype, shape: tuple[int, int, int], alpha: float
) -> None:
    """alpha scales the finished FP32 sum, at every size."""
    m, n, k = shape
    a, b = integers((m, k), dtype, CPU), integers((k, n), dtype, CPU)
    a[1] = torch.nan
    scaled = alpha * product(a, b)
    result = ops.gemm(a, b, alpha=alpha, out_dtype=FP32)
    torch.testing.assert_close(result, scaled, rtol=0, atol=0, equal_nan=True)
    total = integers((m, n), FP32, CPU)
    expected = total + scaled
    ops.gemm_accumulate_(total, a, b, alpha=alpha)
    torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
