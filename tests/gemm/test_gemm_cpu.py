"""Test amp_ext::gemm on a CPU with large products: several blocks, and few rows."""

import itertools

import pytest
import torch
from torch import Tensor

from amp_ext import _C, ops
from cases import OPERANDS, TRANSPOSES, integers, multiplies, stored, threads

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
DIRECT, BLOCKS = 1, 2  # variants of the CPU backend


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in FP32. Sums of products of integers up to 3 are exact in any order."""
    return (a.double() @ b.double()).float()


# Leading dimensions, m, n and k, and numbers of threads.
SHAPES = {
    # a little over one or two parts; threads add up shares of k, and some have nothing to do
    "several parts": ((), (69, 4103, 1027), (1,)),
    "parts of one depth": ((), (69, 4103, 515), (1,)),
    "a short sum": ((), (512, 1024, 33), (1,)),
    "a long sum": ((), (70, 33, 2055), (1, 2, 3, 40)),
    # a workspace for each thread
    "a batch": ((50,), (31, 29, 33), (1, 2, 3)),
    # a thread holds the sums of 128 columns or more, and 4099 steps fill no vector
    **{f"{m} rows": ((2,), (m, 600, 4099), (1, 2, 3)) for m in (1, 3, 8, 32)},
    # a column has strides of 1 in both dimensions, and 15 columns fill no vector
    "1 column": ((), (1, 1, 9001), (1,)),
    "15 columns": ((), (1, 15, 9001), (1,)),
}


@pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("batch", "sizes", "counts"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_sizes(
    dtype: torch.dtype,
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    counts: tuple[int, ...],
    trans: tuple[bool, bool],
) -> None:
    """Products with and without a bias, and sums in place, are exact by any number of threads.

    BF16 is multiplied by pairs, with AMX by 32: NaN behind a row, times a padding 0, would be NaN.
    """
    m, n, k = sizes
    a, b = integers((*batch, m, k), dtype, CPU), integers((*batch, k, n), dtype, CPU)
    bias, c = integers((n,), FP32, CPU), integers((m, n), FP32, CPU)
    exact = product(a, b)
    total = c + (exact.sum(0) if batch else exact)
    options = {"trans_a": trans[0], "trans_b": trans[1]}
    for count, layout in itertools.product(counts, ("contiguous", "inner-block", "every-second")):
        operands = stored(a, trans[0], layout), stored(b, trans[1], layout)
        with threads(count):
            assert torch.equal(ops.gemm(*operands, **options), exact.to(dtype))
            assert torch.equal(ops.gemm(*operands, out_dtype=FP32, **options), exact)
            result = ops.gemm(*operands, bias=bias, out_dtype=FP32, **options)
            actual = c.clone()
            ops.gemm_accumulate_(actual, *operands, sum_batch=bool(batch), **options)
        assert torch.equal(result, exact + bias)
        assert torch.equal(actual, total)


@pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    ("dtype", "variant"), [(FP16, DIRECT), (BF16, DIRECT), (BF16, BLOCKS)], ids=str
)
def test_ways_that_a_table_chooses(
    dtype: torch.dtype, variant: int, trans: tuple[bool, bool]
) -> None:
    """MKL multiplies 16-bit operands in place, and oneDNN BF16 operands in packed blocks."""
    m, n, k = 137, 170, 1023
    layouts = ["transposed" if transposed else "inner-block" for transposed in trans]
    a = OPERANDS[layouts[0]](integers((m, k), dtype, CPU))
    b = OPERANDS[layouts[1]](integers((k, n), dtype, CPU))
    wanted = _C.Product(a, b)
    served = torch.backends.mkl.is_available() if variant == DIRECT else multiplies(BF16)
    assert (("cpu", variant) in wanted.candidates(triton=False)) == served
    if not served:
        pytest.skip("needs MKL in torch" if variant == DIRECT else "needs BF16 instructions")
    before = _C.gemm_mode()
    try:
        _C.set_gemm_mode("auto")
        _C.set_measured("cpu", {tuple(wanted.key): ("cpu", variant, "a test says so")})
        assert _C.Product(a, b).choose() == ("cpu", "a test says so")
        for count in (1, 3, 7):
            with threads(count):
                assert torch.equal(ops.gemm(a, b), product(a, b).to(dtype)), count
    finally:
        _C.set_measured("cpu", {})
        _C.set_gemm_mode(before)


def test_oneDNN_may_be_turned_off() -> None:
    """If oneDNN is off, torch multiplies 16-bit types by its own loops."""
    a = torch.ones(256, 256, dtype=BF16)
    with torch.backends.mkldnn.flags(enabled=False):
        assert _C.Product(a, a).choose()[0] == "cpu"


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


@pytest.mark.parametrize("columns", [64, 37])
def test_rows_of_a_result_far_apart(columns: int) -> None:
    """A row stride beyond the library's offsets of 32 bits is no error."""
    c = torch.empty(64, 1 << 23)[:, :columns].zero_()
    a, b = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(32, columns, dtype=torch.bfloat16)
    ops.gemm_accumulate_(c, a, b)
    assert torch.equal(c, torch.full_like(c, 32.0))
