"""Test amp_ext::gemm on every size, batch, dtype and layout; it is exact where FP32 is."""

from __future__ import annotations

import itertools

import pytest
import torch

from cases import (
    FLOATS,
    KINDS,
    OPERANDS,
    PAIRS,
    TRANSPOSES,
    assert_equal,
    integers,
    normal,
    threads,
)
from executors import (
    Executor,
    against_oracle,
    every_executor,
    every_gemm_executor,
    gemm_against_oracle,
)
from gemm_cases import assert_near_oracle, every_kind, every_size, every_transpose, gemm, product

FP16, BF16, FP32, FP64 = FLOATS
EDGES = (0, 1, 2, 3, 7, 16, 17, 33, 64, 65, 129)

# Coprime in step, so that every dtype meets every transpose.
DTYPES_AND_TRANSPOSES = [(PAIRS[i % 10], TRANSPOSES[i * 3 % 7 % 4]) for i in range(70)]

every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")


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


@every_gemm_executor
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


@every_gemm_executor
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


@gemm_against_oracle
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


@gemm_against_oracle
@every_pair
def test_dtypes(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Each pair of dtypes is multiplied into every dtype, and rounded once."""
    a = normal((33, 70), dtypes[0], executor.device)
    b = normal((70, 20), dtypes[1], executor.device)
    for out_dtype in (None, *FLOATS):
        assert_near_oracle(executor, a, b, out_dtype=out_dtype)


@gemm_against_oracle
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
