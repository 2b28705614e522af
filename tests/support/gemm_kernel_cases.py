"""Products for the GEMM kernel itself: operands placed in memory, plans, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simt_gemm
from cases import integers, spacing
from executors import SIMT
from simt.library import Library, Schedule
from simt_gemm import Gemm, GemmPlan, GemmTile, Sm90Tile

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
SURROUNDINGS = float("nan")


def library() -> Library:
    return SIMT.ops.engine


def tiles() -> list[GemmTile]:
    return simt_gemm.tiles(library()) if not SIMT.missing else []


def sm90_tiles() -> list[Sm90Tile]:
    return simt_gemm.sm90_tiles(library()) if not SIMT.missing else []


# Whether a and b lie by rows, and what is tested with that where it matters little what.
# simt/mutants/few has the first and the last of these.
MAJORS = {"nn": (True, True), "nt": (True, False), "tn": (False, True), "tt": (False, False)}
TYPES = {"nn": FP16, "nt": BF16, "tn": FP16, "tt": BF16}

every_tile = pytest.mark.parametrize(
    "tile",
    range(len(tiles())),
    ids=[f"{t.m}x{t.n}x{t.k}{'' if t.aligned else '-unaligned'}" for t in tiles()],
)


def placed(matrices: Tensor, rows_are_contiguous: bool = True, aligned: bool = True) -> Tensor:
    """Return a batch of matrices as a view of other memory, which is NaN around them.

    Lines, which are rows or columns, begin at multiples of 16 bytes where `aligned`, else not.
    """
    lines = matrices if rows_are_contiguous else matrices.mT
    batch, count, length = lines.shape
    before = 8 if aligned else 1
    whole = -(-(length + 16) // 8) * 8 + (0 if aligned else 3)
    memory = torch.full((batch, count, whole), SURROUNDINGS, dtype=lines.dtype)
    view = memory[:, :, before : before + length].copy_(lines)
    return view if rows_are_contiguous else view.mT


def surroundings_are_intact(view: Tensor) -> bool:
    """Tell whether nothing has been written around a view that `placed` returned."""
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).clone()
    inside = memory.as_strided(view.shape, view.stride(), view.storage_offset())
    inside.fill_(SURROUNDINGS)
    return bool(memory.isnan().all())


def empty(shape: tuple[int, ...], dtype: torch.dtype, aligned: bool = True) -> Tensor:
    """Return a result to be written, placed, with another NaN than that around it."""
    return placed(torch.full(shape, float("nan"), dtype=dtype), aligned=aligned)


def product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = FP16,
    out_dtype: torch.dtype = FP32,
    *,
    majors: tuple[bool, bool] = (True, True),
    aligned: bool = True,
    batch: int = 1,
    terms: int = 1,
    make: Callable[..., Tensor] = integers,
    **options: Any,
) -> Gemm:
    """Return a product of small integers, or of what `make` makes."""
    a = placed(make((batch * terms, m, k), dtype, CPU), majors[0], aligned)
    b = placed(make((batch * terms, k, n), dtype, CPU), majors[1], aligned)
    return Gemm(a, b, empty((batch, m, n), out_dtype, aligned), terms, **options)


def product_of(
    majors: str, m: int, n: int, k: int, out_dtype: torch.dtype = FP32, **options: Any
) -> Gemm:
    """Return a product of operands that lie so, and of the type that is tested with that."""
    return product(m, n, k, TYPES[majors], out_dtype, majors=MAJORS[majors], **options)


def plan_of(gemm: Gemm, tile: int = -1, splits: int = 1, multiprocessors: int = 4) -> GemmPlan:
    return simt_gemm.plan(library(), gemm.args(), multiprocessors, tile, splits)


def run(gemm: Gemm, tile: int = -1, splits: int = 1, schedule: Schedule | None = None) -> None:
    """Run a product by a plan of its own or the planner's."""
    schedule = schedule or SIMT.ops.next_schedule()
    run_plan(gemm, plan_of(gemm, tile, splits, schedule.multiprocessors), schedule)


def run_plan(gemm: Gemm, plan: GemmPlan, schedule: Schedule) -> None:
    """Run a product; assert that nothing was written around its results."""
    simt_gemm.launch(library(), schedule, gemm.args(), plan)
    for written in (gemm.out, None if gemm.derivative else gemm.aux):
        assert written is None or not written.numel() or surroundings_are_intact(written)


def with_odd_strides(gemm: Gemm) -> Gemm:
    """Return the product with strides of indices that have but one value which mean nothing."""
    odd = {}
    for name in ("a", "b"):
        t = getattr(gemm, name)
        sizes = zip(t.shape[1:], t.stride()[1:], strict=True)
        odd[name] = t.as_strided(t.shape, (7, *(3 if size == 1 else by for size, by in sizes)))
    return gemm._replace(**odd)


def _phi(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the distribution of gelu or gelu_tanh, and its derivative."""
    if not tanh:
        cdf = torch.special.ndtr(x)
        return cdf, torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    factor = (2 / torch.pi) ** 0.5
    cdf = torch.sigmoid(2 * factor * (x + 0.044715 * x**3))
    return cdf, cdf * (1 - cdf) * 2 * factor * (1 + 3 * 0.044715 * x * x)


def activated(name: str, x: Tensor) -> Tensor:
    if name == "none":
        return x
    if name == "relu":
        return torch.where(x <= 0, 0.0, x)
    return x * _phi(x, name == "gelu_tanh")[0]


def derivative(name: str, at: Tensor) -> Tensor:
    if name == "none":
        return torch.ones_like(at)
    if name == "relu":
        return torch.where(at <= 0, 0.0, 1.0).double()
    cdf, slope = _phi(at, name == "gelu_tanh")
    return cdf + at * slope


def special_values() -> Tensor:
    """Return numbers at which formulas of activations overflow or are not defined."""
    values = (0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 1e30, -1e30, float("inf"), float("nan"))
    return torch.tensor(values)


def slopes_at_special_values(name: str) -> Tensor:
    """Return the limits of an activation's derivative."""
    slopes = torch.tensor([0.5] * 4 + [1.0, 0.0, 1.0, 0.0, 1.0, float("nan")])
    if name == "relu":
        slopes[:4], slopes[-1] = torch.tensor([0.0, 0.0, 1.0, 0.0]), 1.0
    return slopes


def linear_part(gemm: Gemm, magnitude: bool = False) -> Tensor:
    """Return alpha * a @ b + beta * c + bias in float64, or the sum of the terms' magnitudes."""

    def number(x: Any) -> Any:
        x = x.double() if isinstance(x, Tensor) else x
        return abs(x) if magnitude else x

    batch, m, n = gemm.out.shape
    products = number(gemm.a) @ number(gemm.b)
    result = number(gemm.alpha) * products.view(batch, gemm.terms, m, n).sum(1)
    if gemm.c is not None:
        result += number(gemm.beta) * number(gemm.c)
    if gemm.bias is not None:
        result += number(gemm.bias)
    return result


def exact(gemm: Gemm) -> Tensor:
    """Return the result in float64."""
    x = linear_part(gemm)
    if gemm.derivative:
        return x * derivative(gemm.activation, gemm.aux.double())
    return activated(gemm.activation, x)


def assert_activated_near(actual: Tensor, expected: Tensor, x: Tensor) -> None:
    """Compare an activation of an x without error, or x times a derivative, rounded once.

    The factor of x is a sum of terms below 1.2 in magnitude, products of functions (erfcf, expf, a
    reciprocal) that are off by 4 units in the last place at most. An exponent e, at most 16 where
    exp(-e) matters, is off by a few units of 2**-24 * e. All of it is below 32 units of 2**-24.
    """
    allowed = x.abs() * 2.0**-19
    allowed += spacing(expected.abs() + allowed, actual.dtype) / 2
    off = (actual.double() - expected).abs()
    assert (off <= allowed).all(), f"off by {(off / allowed).max().item()} times what is allowed"
