"""The epilogue of the GEMM kernel for sm_90a on tests/simt: c, bias, activations, aux, and sums."""

from __future__ import annotations

import itertools

import pytest
import torch

import simt_gemm
from cases import assert_equal, assert_same, assert_sum_near, bits, integers, normal, spacing
from executors import SIMT
from gemm_kernel_cases import (
    CPU,
    FP16,
    FP32,
    activated,
    assert_activated_near,
    derivative,
    empty,
    exact,
    library,
    linear_part,
    placed,
    run_plan,
    slopes_at_special_values,
    sm90_tiles,
    special_values,
)
from gemm_sm90_cases import (
    CLUSTERS,
    MOST_BOXES,
    OUT_TYPES,
    SHARED_BYTES,
    STEP,
    by_hand,
    every_tile,
    plan_sm90,
    product_for,
    run_sm90,
    shared_bytes,
    tiles_of,
)
from simt.library import Schedule
from simt_gemm import ACTIVATIONS, Gemm

pytestmark = [
    pytest.mark.simt,
    pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing),
]

every_type = pytest.mark.parametrize("dtype", OUT_TYPES, ids=["fp32", "fp16", "bf16"])
SIDES = ("none", "c", "in-place", "aux", "derivative")


def with_side(gemm: Gemm, side: str) -> Gemm:
    """Return the product with a second matrix that goes through boxes, of small integers."""
    if side == "c":
        c = placed(integers(gemm.out.shape, gemm.out.dtype, CPU))
        return gemm._replace(c=c, beta=-2.0)
    if side == "in-place":
        gemm.out.copy_(integers(gemm.out.shape, gemm.out.dtype, CPU))
        return gemm._replace(c=gemm.out, beta=-2.0)
    if side == "aux":
        return gemm._replace(aux=empty(gemm.out.shape, gemm.out.dtype), activation="relu")
    if side == "derivative":
        aux = placed(integers(gemm.out.shape, gemm.out.dtype, CPU))
        return gemm._replace(aux=aux, activation="relu", derivative=True)
    return gemm


def with_all(gemm: Gemm, bias_dtype: torch.dtype = FP32) -> Gemm:
    """Return the product with everything added that is exact in small integers."""
    n = gemm.out.shape[2]
    return gemm._replace(
        bias=integers((n,), bias_dtype, CPU),
        alpha=0.5,
        activation=gemm.activation if gemm.derivative else "relu",
        column_sums=torch.full((n,), float("nan")),
    )


class Expected:
    """What must come out, computed before c is overwritten."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self.out, self.aux = exact(gemm), linear_part(gemm)

    def assert_exact(self) -> None:
        gemm = self.gemm
        assert_equal(gemm.out, self.out)
        if gemm.aux is not None and not gemm.derivative:
            assert_equal(gemm.aux, self.aux)
        if gemm.column_sums is not None:
            assert_equal(gemm.column_sums, self.out.sum((0, 1)))


def fits(gemm: Gemm, tile: int) -> bool:
    """Tell whether a tile leaves room for the boxes of the result and of aux, and three stages."""
    stores_aux = gemm.aux is not None and not gemm.derivative
    plan = plan_sm90(gemm._replace(aux=None), tile)
    return not stores_aux or shared_bytes(plan, gemm.out.dtype, 3, 4) <= SHARED_BYTES


@every_tile
@every_type
@pytest.mark.parametrize("side", SIDES)
def test_all_at_once(tile: int, dtype: torch.dtype, side: str) -> None:
    """On several tiles in either direction, of one block or of several ones, whole or in shares."""
    number = SIDES.index(side) + OUT_TYPES.index(dtype)
    for cluster, splits in itertools.product(CLUSTERS[number % 3 :], (1, 2)):
        sizes = tiles_of(tile, 1 + cluster[0], 2)
        gemm = product_for(tile, *sizes, 2 * STEP - 5, dtype, batch=1 + (cluster[1] > 1))
        gemm = with_all(with_side(gemm, side), OUT_TYPES[(number + splits) % 3])
        if not fits(gemm, tile):
            continue
        expected = Expected(gemm)
        schedule = Schedule(number + splits, 2, (2, 5)[number % 2])
        run_sm90(gemm, tile, cluster=cluster, whole=1, splits=splits, schedule=schedule)
        expected.assert_exact()


@every_tile
@every_type
@pytest.mark.parametrize("side", SIDES[1:])
def test_boxes(tile: int, dtype: torch.dtype, side: str) -> None:
    """Any number of them, in every schedule; of parts that are at the edges and of all others."""
    config = sm90_tiles()[tile]
    for i, sizes in enumerate(((config.m, config.n), tiles_of(tile, 2, 2))):
        gemm = with_side(product_for(tile, *sizes, STEP, dtype, batch=2 - i), side)
        if not fits(gemm, tile):
            continue
        plan, before = plan_sm90(gemm, tile, multiprocessors=1), gemm.out.clone()
        expected = Expected(gemm)
        of_slot = 2 if side == "aux" else 1
        counts = ((2, slots * of_slot) for slots in range(2, MOST_BOXES // of_slot + 1))
        for hand_made in by_hand(plan, dtype, counts):
            gemm.out.copy_(before)
            run_plan(gemm, hand_made, Schedule(i + hand_made.boxes // of_slot))
            expected.assert_exact()


# ---- c -----------------------------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_memory_system_accumulates(tile: int, alpha: float) -> None:
    """Into fp32, in place, where nothing is asked of the sums: out is not read by the kernel."""
    for cluster, splits in zip(CLUSTERS, (1, 3, 2), strict=True):
        gemm = product_for(tile, *tiles_of(tile, 2, 2), 3 * STEP, batch=2, alpha=alpha)
        gemm.out.copy_(integers(gemm.out.shape, FP32, CPU))
        gemm = gemm._replace(c=gemm.out)
        expected = exact(gemm)
        before = library().counters()
        plan = run_sm90(gemm, tile, cluster=cluster, splits=splits)
        copied = (library().counters() - before).bytes_copied
        assert plan.reduce
        assert_equal(gemm.out, expected)
        again = gemm._replace(c=None, out=empty(gemm.out.shape, FP32))
        before = library().counters()
        assert not run_sm90(again, tile, cluster=cluster, splits=splits).reduce
        assert copied == (library().counters() - before).bytes_copied


@every_type
def test_layouts_of_c(dtype: torch.dtype) -> None:
    """Those of its rows and matrices that TMA knows."""
    for tile, gap in itertools.product((0, 5), (0, 16)):
        gemm = product_for(tile, 70, 41, STEP, dtype, batch=3, beta=2.0)
        wide = placed(integers((6, 75, 41 + gap), dtype, CPU))
        c = wide[::2, 5:, gap:]
        gemm = gemm._replace(c=c)
        run_sm90(gemm, tile)
        assert_equal(gemm.out, exact(gemm))
        zero = gemm._replace(beta=0.0)
        run_sm90(zero, tile)
        assert_equal(zero.out, exact(zero._replace(c=None)))


# ---- bias, activations, aux --------------------------------------------------------------------


@every_tile
@every_type
def test_bias(tile: int, dtype: torch.dtype) -> None:
    """In memory that is NaN around it."""
    n = tiles_of(tile, 1, 2)[1]
    for number in range(3):
        bias = torch.full((n + 8,), float("nan"), dtype=dtype)[7:-1]
        bias.copy_(integers((n,), dtype, CPU))
        gemm = product_for(tile, 20, n, 40, OUT_TYPES[number], bias=bias)
        run_sm90(gemm, tile)
        Expected(gemm).assert_exact()


@pytest.mark.parametrize("stride", [0, 3])
def test_bias_of_other_strides_is_the_other_kernels(stride: int) -> None:
    bias = integers((64 * 3,), FP16, CPU).as_strided((64,), (stride,))
    gemm = product_for(0, 64, 64, 64, FP16, bias=bias)
    assert not simt_gemm.serves_sm90(library(), gemm.args())
    assert simt_gemm.serves_sm90(library(), gemm._replace(bias=bias.clone()).args())


@every_tile
@every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(tile: int, dtype: torch.dtype, activation: str) -> None:
    """The result is that of x before it is rounded into aux."""
    gemm = product_for(tile, 70, 45, 24, dtype, alpha=0.125, activation=activation)
    with_aux = gemm._replace(aux=empty(gemm.out.shape, dtype))
    for one in (gemm, with_aux) if fits(with_aux, tile) else (gemm,):
        run_sm90(one, tile)
        x = linear_part(one)
        assert x.min() < -3 and x.max() > 3
        assert one.aux is None or assert_equal(one.aux, x) is None
        assert_activated_near(one.out, exact(one), x)


@every_tile
@every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivative(tile: int, dtype: torch.dtype, activation: str) -> None:
    gemm = product_for(tile, 70, 45, 24, dtype, activation=activation, derivative=True)
    aux = placed(3 * normal(gemm.out.shape, dtype, CPU))
    aux[0, 0, :3] = 0.0
    gemm, before = gemm._replace(aux=aux), bits(aux)
    run_sm90(gemm, tile)
    assert_same(bits(gemm.aux), before)
    assert_activated_near(gemm.out, exact(gemm), linear_part(gemm))


def test_activations_of_special_values() -> None:
    """And the derivatives' limits, where their formulas overflow."""
    special = special_values()
    for activation in ACTIVATIONS[1:]:
        gemm = product_for(5, 4, len(special), 8, activation=activation, bias=special, alpha=0.0)
        run_sm90(gemm, 5)
        expected = activated(activation, special.double()).float()
        torch.testing.assert_close(gemm.out[0, 0], expected, rtol=2.0**-20, atol=0, equal_nan=True)
        aux = placed(special.expand(1, 4, -1))
        ones = gemm._replace(bias=torch.ones(len(special)), aux=aux, derivative=True)
        run_sm90(ones, 5)
        slopes = slopes_at_special_values(activation)
        torch.testing.assert_close(ones.out[0, 0], slopes, rtol=0, atol=1e-20, equal_nan=True)


# ---- column sums, rounding ---------------------------------------------------------------------


@every_tile
@every_type
def test_sums_of_many_tiles(tile: int, dtype: torch.dtype) -> None:
    """Of batches of several tiles, some of which are outside of the matrix."""
    for cluster, splits in zip(CLUSTERS, (1, 2, 1), strict=True):
        m, n = tiles_of(tile, 3, 3)
        gemm = product_for(tile, m, n, 2 * STEP, dtype, batch=2)
        gemm = gemm._replace(column_sums=torch.full((n,), float("nan")))
        run_sm90(gemm, tile, cluster=cluster, whole=5, splits=splits)
        Expected(gemm).assert_exact()


@every_tile
@every_type
@pytest.mark.parametrize("derivative_form", [False, True])
def test_sums_are_of_what_is_rounded(tile: int, dtype: torch.dtype, derivative_form: bool) -> None:
    """Of the fp32 values: off by an error of a sum in fp32, not by roundings to 16 bits."""
    rows, k = 2 * 150, 33
    gemm = product_for(tile, 150, 45, k, dtype, make=normal, batch=2, activation="relu")
    gemm = gemm._replace(column_sums=torch.empty(45))
    if derivative_form:
        aux = placed(normal(gemm.out.shape, dtype, CPU))
        gemm = gemm._replace(aux=aux, derivative=True)
    run_sm90(gemm, tile, cluster=CLUSTERS[tile % 3])
    mask = derivative("relu", (gemm.aux if derivative_form else linear_part(gemm)).double())
    magnitude = (linear_part(gemm, magnitude=True) * mask).sum((0, 1))
    slack = linear_part(gemm, magnitude=True).sum((0, 1)) * k * 2.0**-24
    assert_sum_near(gemm.column_sums, exact(gemm).sum((0, 1)), magnitude + slack, rows + k)


def test_results_are_rounded_to_nearest_even() -> None:
    for tile, dtype in itertools.product((0, 5), OUT_TYPES[1:]):
        step = spacing(torch.ones((), dtype=torch.float64), dtype).float()
        values = 1 + step / 2 * torch.arange(-8, 8).float()
        gemm = product_for(tile, 3, 16, 8, dtype, bias=values, alpha=0.0)
        for one in (gemm, gemm._replace(aux=empty(gemm.out.shape, dtype))):
            run_sm90(one, tile)
            assert_equal(one.out, values.double().expand(1, 3, 16))
            assert one.aux is None or assert_equal(one.aux, exact(one)) is None
