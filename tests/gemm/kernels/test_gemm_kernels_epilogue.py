"""The GEMM kernel's epilogue on tests/simt: c, bias, activations, aux, column sums."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cases import assert_equal, assert_same, assert_sum_near, bits, integers, normal, spacing
from executors import SIMT
from gemm_kernel_cases import (
    BF16,
    CPU,
    FP16,
    FP32,
    activated,
    assert_activated_near,
    derivative,
    empty,
    every_tile,
    exact,
    linear_part,
    placed,
    product,
    product_of,
    run,
    slopes_at_special_values,
    special_values,
    tiles,
)
from simt_gemm import ACTIVATIONS, Gemm

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

TYPES = (FP32, FP16, BF16)
every_type = pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "fp16", "bf16"])

# Name -> c for a result of this shape, from memory that is NaN between and around its elements.
C_LAYOUTS = {
    "aligned": lambda shape: placed(integers(shape, FP32, CPU)),
    "misaligned": lambda shape: placed(integers(shape, FP32, CPU), aligned=False),
    "transposed": lambda shape: placed(integers(shape, FP32, CPU), rows_are_contiguous=False),
    "every-second": lambda shape: placed(integers((*shape[:2], 2 * shape[2]), FP32, CPU))[..., ::2],
    "row": lambda shape: integers(shape[2:], FP32, CPU).expand(shape),
    "column": lambda shape: integers((shape[1], 1), FP32, CPU).expand(shape),
    "of-each-matrix": lambda shape: integers((shape[0], 1, 1), FP32, CPU).expand(shape),
    "scalar": lambda shape: integers((), FP32, CPU).expand(shape),
}


def same_layout(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same view of memory of another type."""
    memory = torch.empty(0).set_(values.untyped_storage()).to(dtype)
    return memory.as_strided(values.shape, values.stride(), values.storage_offset())


def with_all(gemm: Gemm, tile: int) -> Gemm:
    """Return the product with everything added that is exact in small integers."""
    batch, m, n = gemm.out.shape
    return gemm._replace(
        c=same_layout(C_LAYOUTS["aligned"]((batch, m, n)), TYPES[tile % 3]),
        bias=integers((n,), TYPES[tile // 3], CPU),
        aux=empty((batch, m, n), TYPES[(tile + 1) % 3]),
        alpha=0.5,
        beta=-2.0,
        activation="relu",
        column_sums=torch.full((n,), float("nan")),
    )


def assert_all_exact(gemm: Gemm) -> None:
    assert_equal(gemm.out, exact(gemm))
    assert_equal(gemm.aux, linear_part(gemm))
    assert_equal(gemm.column_sums, exact(gemm).sum((0, 1)))


@every_tile
@every_type
@pytest.mark.parametrize("splits", [1, 2])
def test_all_at_once(tile: int, dtype: torch.dtype, splits: int) -> None:
    """On several tiles in either direction."""
    config = tiles()[tile]
    sizes = config.m + 13, config.n + 21, 2 * config.k
    gemm = with_all(product_of("tt", *sizes, dtype, aligned=config.aligned), tile)
    run(gemm, tile, splits)
    assert_all_exact(gemm)


@every_tile
def test_column_sums_of_many_tiles(tile: int) -> None:
    """More rows of tiles than there are groups of threads to add them up."""
    config = tiles()[tile]
    groups = 32 * config.warps_m * config.warps_n // (config.n // 4)
    batch = 2 * groups + 1
    gemm = product(9, config.n + 5, 8, aligned=config.aligned, batch=batch)
    gemm = gemm._replace(column_sums=torch.full((config.n + 5,), float("nan")))
    run(gemm, tile)
    assert_equal(gemm.column_sums, exact(gemm).sum((0, 1)))


@every_type
@pytest.mark.parametrize("layout", C_LAYOUTS)
@pytest.mark.parametrize("n", [64, 61])
def test_layouts_of_c(dtype: torch.dtype, layout: str, n: int) -> None:
    for batch, splits in itertools.product((1, 3), (1, 2)):
        gemm = product(21, n, 300, batch=batch, beta=2.0)
        gemm = gemm._replace(c=same_layout(C_LAYOUTS[layout](gemm.out.shape), dtype))
        run(gemm, tile=4, splits=splits)
        assert_equal(gemm.out, exact(gemm))


@every_type
@pytest.mark.parametrize("aligned", [True, False])
def test_accumulation_in_place(dtype: torch.dtype, aligned: bool) -> None:
    for splits in (1, 3):
        gemm = product(70, 75, 300, out_dtype=dtype, aligned=aligned)
        gemm.out.copy_(integers(gemm.out.shape, dtype, CPU))
        expected = exact(gemm._replace(c=gemm.out.clone(), alpha=0.5))
        run(gemm._replace(c=gemm.out, alpha=0.5), tile=4 if aligned else 8, splits=splits)
        assert_equal(gemm.out, expected)


@every_type
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_bias(dtype: torch.dtype, stride: int) -> None:
    for n in (7, 64, 130):
        memory = integers((4 * n,), dtype, CPU)
        gemm = product(20, n, 40)._replace(bias=memory.as_strided((n,), (stride,), stride))
        run(gemm)
        assert_equal(gemm.out, exact(gemm))


# ---- activations -------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(dtype: torch.dtype, activation: str) -> None:
    """The result is that of x before it is rounded into aux."""
    for tile, aux_dtype in zip((2, 4, 5), TYPES, strict=True):
        gemm = product(40, 35, 24, out_dtype=dtype, alpha=0.125, activation=activation)
        gemm = gemm._replace(aux=empty(gemm.out.shape, aux_dtype))
        run(gemm, tile)
        x = linear_part(gemm)
        assert x.min() < -3 and x.max() > 3
        assert_equal(gemm.aux, x)
        assert_activated_near(gemm.out, exact(gemm), x)


@every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivative(dtype: torch.dtype, activation: str) -> None:
    for tile, aux_dtype in zip((2, 4, 5), TYPES, strict=True):
        gemm = product(40, 35, 24, out_dtype=dtype, activation=activation, derivative=True)
        aux = placed(3 * normal(gemm.out.shape, aux_dtype, CPU), aligned=aux_dtype != FP16)
        aux[0, 0, :3] = 0.0
        gemm = gemm._replace(aux=aux)
        before = bits(aux)
        run(gemm, tile)
        assert_same(bits(gemm.aux), before)
        assert_activated_near(gemm.out, exact(gemm), linear_part(gemm))


def test_activations_of_special_values() -> None:
    """And the derivatives' limits, where their formulas overflow."""
    special = special_values()
    for activation in ACTIVATIONS[1:]:
        gemm = product(4, len(special), 0, activation=activation, bias=special)
        run(gemm)
        expected = activated(activation, special.double()).float()
        torch.testing.assert_close(gemm.out[0, 0], expected, rtol=2.0**-20, atol=0, equal_nan=True)
        aux = special.expand(1, 4, -1).contiguous()
        ones = gemm._replace(bias=torch.ones(len(special)), aux=aux, derivative=True)
        run(ones)
        slopes = slopes_at_special_values(activation)
        torch.testing.assert_close(ones.out[0, 0], slopes, rtol=0, atol=1e-20, equal_nan=True)


# ---- column sums, rounding ---------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("derivative_form", [False, True])
def test_column_sums_are_of_what_is_rounded(dtype: torch.dtype, derivative_form: bool) -> None:
    """Of the fp32 values: off by an error of a sum in fp32, not by roundings to 16 bits."""
    rows, k = 2 * 150, 33
    gemm = product(150, 45, k, out_dtype=dtype, make=normal, batch=2, activation="relu")
    gemm = gemm._replace(column_sums=torch.empty(45))
    if derivative_form:
        gemm = gemm._replace(aux=normal(gemm.out.shape, FP16, CPU), derivative=True)
    run(gemm, tile=4)
    mask = derivative("relu", (gemm.aux if derivative_form else linear_part(gemm)).double())
    magnitude = (linear_part(gemm, magnitude=True) * mask).sum((0, 1))
    slack = linear_part(gemm, magnitude=True).sum((0, 1)) * k * 2.0**-24
    assert_sum_near(gemm.column_sums, exact(gemm).sum((0, 1)), magnitude + slack, rows + k)


def test_results_are_rounded_to_nearest_even() -> None:
    for dtype in (FP16, BF16):
        step = spacing(torch.ones((), dtype=torch.float64), dtype).float()
        values = 1 + step / 2 * torch.arange(-8, 8).float()
        gemm = product(3, 16, 0, out_dtype=dtype, bias=values)
        run(gemm)
        assert_equal(gemm.out, values.double().expand(1, 3, 16))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelus_keep_their_tails(activation: str) -> None:
    """They are x * Phi(x): far out Phi is exp of a number that a few roundings of 2**-24 precede.

    Each of them counts as often as that number is large. Results are FP32, of exact sums.
    """
    x = torch.arange(-96, 97, dtype=torch.float64) / 8
    u2 = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    if activation == "gelu":
        phi, exponent = torch.special.erfc(-x / math.sqrt(2)) / 2, x**2 / 2
    else:
        phi, exponent = u2.sigmoid(), u2.abs()
    ones = torch.ones(1, 1, dtype=FP16)
    actual = SIMT.ops.gemm(x.half()[:, None], ones, activation=activation, out_dtype=FP32)
    error = (actual[:, 0].double() - x * phi).abs()
    bound = (8 * exponent + 32) * 2.0**-24 * (x * phi).abs() + 2.0**-126
    assert bool((error <= bound).all()), (error / bound).max()
