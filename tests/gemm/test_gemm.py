"""Test amp_ext::gemm on every size, batch, dtype, layout, addend and kind of number."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import (
    FLOATS,
    KINDS,
    NON_FINITE,
    OPERANDS,
    PAIRS,
    TRANSPOSES,
    assert_all_same,
    assert_equal,
    integers,
    normal,
    stored,
    threads,
)
from executors import (
    Executor,
    against_oracle,
    every_executor,
)
from gemm_cases import assert_near_oracle, every_kind, every_size, every_transpose, gemm, product

FP16, BF16, FP32, FP64 = FLOATS
EDGES = (0, 1, 2, 3, 7, 16, 17, 33, 64, 65, 129)

# Coprime in step, so that every dtype meets every transpose.
DTYPES_AND_TRANSPOSES = [(PAIRS[i % 10], TRANSPOSES[i * 3 % 7 % 4]) for i in range(70)]


# ---- sizes -------------------------------------------------------------------------------------


@every_executor
@every_transpose
def test_sizes(executor: Executor, trans: tuple[bool, bool]) -> None:
    """Every two of m, n and k meet in every two sizes, and with them every pair of dtypes.

    Sums of 129 products of integers up to 3 are exact in FP32, and in FP16 up to 2048.
    """
    for (i, m), (j, n) in itertools.product(enumerate(EDGES), repeat=2):
        sizes, dtypes = (m, n, EDGES[(i + j) % len(EDGES)]), PAIRS[(3 * i + j) % len(PAIRS)]
        a, b, options, exact = product(executor, sizes, dtypes, trans)
        assert_equal(gemm(executor, a, b, **options), exact)


@every_executor
@pytest.mark.parametrize(
    "sizes", [(5000, 3, 5), (3, 5000, 5), (3, 5, 5000), (1, 5000, 130), (130, 1, 5000)], ids=str
)
def test_one_long_side(executor: Executor, sizes: tuple[int, int, int]) -> None:
    """A side longer than any kernel's block gives exact sums: 5000 * 3 * 3 is exact in FP32."""
    for dtypes, trans in zip(PAIRS, itertools.cycle(TRANSPOSES), strict=False):
        a, b, options, exact = product(executor, sizes, dtypes, trans)
        assert_equal(gemm(executor, a, b, out_dtype=FP32, **options), exact)


@every_executor
def test_long_in_every_direction(executor: Executor) -> None:
    """A product of several blocks in each direction is exact."""
    sizes = 1100, 1050, 1200
    a, b, options, exact = product(executor, sizes, (FP16, FP16), (False, True))
    assert_equal(gemm(executor, a, b, out_dtype=FP32, **options), exact)


@every_executor
@pytest.mark.parametrize(
    ("a_batch", "b_batch"),
    [
        *[((4,), (4,)), ((2, 3), (2, 3)), ((4,), ()), ((), (2, 3)), ((1,), (1,))],
        *[((), ()), ((0,), ()), ((2, 0), (2, 0))],
    ],
    ids=str,
)
@every_size
def test_batches(
    executor: Executor,
    a_batch: tuple[int, ...],
    b_batch: tuple[int, ...],
    sizes: tuple[int, int, int],
) -> None:
    """Products of integers in every two layouts are exact, batched or not."""
    calls, batches = itertools.cycle(DTYPES_AND_TRANSPOSES), (a_batch, b_batch)
    for layouts in itertools.product(OPERANDS, repeat=2):
        if all(batch or "batch" not in name for name, batch in zip(layouts, batches, strict=True)):
            a, b, options, exact = product(executor, sizes, *next(calls), layouts, batches)
            assert_equal(gemm(executor, a, b, **options), exact)


@every_executor
@pytest.mark.parametrize("batch", [(12,), (2, 3), (1,), (2, 0)], ids=str)
@every_size
def test_sum_over_the_batch(
    executor: Executor, batch: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    """Sums over batches of integers in every two layouts are exact."""
    calls = itertools.cycle(DTYPES_AND_TRANSPOSES)
    bias = integers((sizes[1],), FP32, executor.device)
    for layouts in itertools.product(OPERANDS, repeat=2):
        a, b, options, exact = product(executor, sizes, *next(calls), layouts, (batch, batch))
        actual = gemm(executor, a, b, bias=bias, sum_batch=True, out_dtype=FP32, **options)
        assert_equal(actual, exact.flatten(0, -3).sum(0) + bias)


@against_oracle
@every_kind
def test_error_of_a_sum_over_the_batch(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """A sum over the batch is rounded once, at its end."""
    a = normal((7, 9, 33, 20), dtypes[0], executor.device)
    b = normal((7, 9, 17, 20), dtypes[1], executor.device)
    c = normal((33, 1), FP32, executor.device)
    for out_dtype in (None, FP32):
        assert_near_oracle(executor, a, b, trans_b=True, sum_batch=True, c=c, out_dtype=out_dtype)


# ---- dtypes and layouts ------------------------------------------------------------------------


@against_oracle
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_dtypes(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Each pair of dtypes is multiplied into every dtype, and rounded once."""
    a = normal((33, 70), dtypes[0], executor.device)
    b = normal((70, 20), dtypes[1], executor.device)
    for out_dtype in (None, *FLOATS):
        assert_near_oracle(executor, a, b, out_dtype=out_dtype)


@against_oracle
@pytest.mark.parametrize("k", [7, 500, 5000])
def test_error_of_long_sums(executor: Executor, k: int) -> None:
    """Long sums of operands of different magnitudes show roundings, by one thread or two."""
    for dtypes, count in itertools.product(KINDS, (1, 2)):
        a = normal((17, k), dtypes[0], executor.device) * 2.0**-6
        b = normal((31, k), dtypes[1], executor.device) * 2.0**3
        with threads(count):
            assert_near_oracle(executor, a, b, trans_b=True, alpha=1 / 3, out_dtype=FP32)


@against_oracle
def test_attention_of_one_head(executor: Executor) -> None:
    """Operands of attention with one head, [batch, 1, time, width], have a meaningless stride."""
    for dtype in (FP16, BF16):
        q, k = (integers((3, 16, 1, 8), dtype, executor.device).transpose(1, 2) for _ in range(2))
        assert_equal(gemm(executor, q, k, trans_b=True), q.double() @ k.double().mT)


# ---- c, bias, alpha and beta ---------------------------------------------------------------------


C_SHAPES = ["", "1", "n", "m1", "1n", "mn", "311", "3m1", "3mn"]


@against_oracle
@every_size
@pytest.mark.parametrize("c_shape", C_SHAPES)
def test_epilogue(executor: Executor, c_shape: str, sizes: tuple[int, int, int]) -> None:
    """Every combination of alpha and beta works over broadcast shapes of c."""
    m, n, k = sizes
    shape = [{"m": m, "n": n}.get(letter) or int(letter) for letter in c_shape]
    combinations = itertools.product((1.0, 0.0, -0.3), (1.0, 0.0, 1.7), (FP16, FP32))
    dtypes, c_dtypes = itertools.cycle(PAIRS), itertools.cycle(FLOATS)
    bias_dtypes = itertools.cycle((None, *FLOATS))
    for alpha, beta, out_dtype in combinations:
        (a_dtype, b_dtype), c_dtype = next(dtypes), next(c_dtypes)
        bias_dtype = next(bias_dtypes)
        a = normal((3, m, k) if len(shape) == 3 else (m, k), a_dtype, executor.device)
        b = normal((k, n), b_dtype, executor.device)
        bias = None if bias_dtype is None else normal((n,), bias_dtype, executor.device)
        options = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype}
        c = normal(tuple(shape), c_dtype, executor.device)
        assert_near_oracle(executor, a, b, c=c, bias=bias, **options)


@against_oracle
@every_size
@pytest.mark.parametrize("layout", OPERANDS)
def test_layouts_of_c(executor: Executor, layout: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a = normal((3, m, k), FP16, executor.device)
    for c_dtype, b_dtype, out_dtype in zip(
        FLOATS, (FP16, FP32, FP16, FP32), (None, None, FP32, FP16), strict=True
    ):
        c = OPERANDS[layout](normal((3, m, n), c_dtype, executor.device))
        b = normal((k, n), b_dtype, executor.device)
        bias = normal((n, 2), FP32, executor.device)[:, 1]
        assert_near_oracle(executor, a, b, c=c, beta=0.7, bias=bias, out_dtype=out_dtype)


@every_executor
@pytest.mark.parametrize("k", [0, 4])
def test_c_is_not_read_when_beta_is_0(executor: Executor, k: int) -> None:
    a, b = torch.ones(3, k, device=executor.device), torch.ones(k, 3, device=executor.device).half()
    c = torch.tensor(NON_FINITE, device=executor.device).expand(3, 3)
    assert_equal(gemm(executor, a, b, c=c, beta=0.0), torch.full((3, 3), k, dtype=FP64))


@every_executor
@pytest.mark.parametrize(("batch", "dtype"), [((), FP16), ((2,), BF16), ((2,), FP64)], ids=str)
def test_inner_dimension_of_0(
    executor: Executor, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    a = torch.empty(*batch, 3, 0, dtype=dtype, device=executor.device)
    b = torch.empty(0, 2, dtype=dtype, device=executor.device)
    c, bias = torch.tensor([[1.0], [-8.0], [math.nan]]), torch.tensor([0.5, 6.0])
    c, bias = c.to(dtype).to(executor.device), bias.to(executor.device)
    zeros = torch.zeros(*batch, 3, 2, dtype=FP64)
    assert_equal(gemm(executor, a, b), zeros)
    expanded = a.new_ones(()).expand(*batch, 3, 0), b.new_ones(()).expand(0, 2)
    assert_equal(gemm(executor, *expanded), zeros)
    actual = gemm(executor, a, b, alpha=3.0, c=c, beta=2.0, bias=bias)
    exact = torch.tensor([[2.5, 8.0], [-15.5, -10.0], [math.nan, math.nan]], dtype=FP64)
    assert_equal(actual, exact.expand(actual.shape))


# ---- numbers -------------------------------------------------------------------------------------


@every_executor
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


@every_executor
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


@every_executor
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


@every_executor
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


@every_executor
def test_fp16_subnormals_are_kept(executor: Executor) -> None:
    every = torch.arange(1, 1024, dtype=torch.int16).view(FP16)
    subnormals = every.view(-1, 1).to(executor.device)
    for factor in (1.0, 2.0, 1024.0, -1.0):
        b = torch.full((1, 1), factor, device=executor.device).half()
        assert_equal(executor.ops.gemm(subnormals, b), factor * subnormals.double())
    small = torch.full((1, 1), 2.0**-12, device=executor.device).half()
    assert executor.ops.gemm(small, small).item() == 2.0**-24


@every_executor
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


@against_oracle
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
