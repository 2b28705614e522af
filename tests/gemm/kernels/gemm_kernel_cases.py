"""Run products on the CUDA kernels by amp_ext.ops on ptx: operands, computation and results.

Operands are placed in memory with a given layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import assert_equal, integers
from planner import gemm_tiles
from ptx_backend.backend import Schedule, ptx

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
OUT_TYPES = (FP32, FP16, BF16)
CPU = torch.device("cpu")
SURROUNDINGS = float("nan")

# Whether a and b lie by rows, and the dtype for tests in which the dtype matters little.
MAJORS = {"nn": (True, True), "nt": (True, False), "tn": (False, True), "tt": (False, False)}
TYPES = {"nn": FP16, "nt": BF16, "tn": FP16, "tt": BF16}


class Tile(NamedTuple):
    """A tile of the kernels, as gemm_tiles describes it.

    Attributes:
        number: its index among the tiles of its kernel.
        stages: of the ring; of sm_90a the most, as they depend on the result.
        majors: the layout for tests in which the layout matters little.
    """

    text: str
    sm90: bool
    number: int
    m: int
    n: int
    k: int
    stages: int
    majors: str

    @property
    def aligned(self) -> bool:
        """Whether it needs operands with lines that begin at multiples of 16 bytes."""
        return "single elements" not in self.text

    def of(self, m: int, n: int) -> tuple[int, int]:
        """Return the size of m by n tiles, the last ones of a few rows and columns."""
        return (m - 1) * self.m + 5, (n - 1) * self.n + (8 if self.sm90 else 9)


def _tiles(sm90: bool) -> list[Tile]:
    found = []
    for number, text in enumerate(gemm_tiles(sm90)):
        sizes = map(int, re.findall(r"tile (\d+)x(\d+)x(\d+)", text)[0])
        stages = 8 if sm90 else int(re.findall(r"(\d+) stages", text)[0])
        majors = ("nn", "tn", "nt", "tt", "nn", "nt")[number] if sm90 else ("nn", "tt")[number % 2]
        found.append(Tile(text, sm90, number, *sizes, stages, majors))
    return found


def _name(tile: Tile) -> str:
    kind = "sm90-" if tile.sm90 else "" if tile.aligned else "unaligned-"
    return f"{kind}{tile.m}x{tile.n}x{tile.k}"


SM80_TILES, SM90_TILES = _tiles(False), _tiles(True)
TILES = SM80_TILES + SM90_TILES
every_tile = pytest.mark.parametrize("tile", TILES, ids=_name)
every_sm80_tile = pytest.mark.parametrize("tile", SM80_TILES, ids=_name)
every_sm90_tile = pytest.mark.parametrize("tile", SM90_TILES, ids=_name)
every_majors = pytest.mark.parametrize("majors", MAJORS)
every_type = pytest.mark.parametrize("dtype", OUT_TYPES, ids=["fp32", "fp16", "bf16"])


# ---- products ----------------------------------------------------------------------------------


def placed(matrices: Tensor, rows_are_contiguous: bool = True, aligned: bool = True) -> Tensor:
    """Return a batch of matrices as a view of other memory, with NaN around them.

    Lines (rows or columns) begin at multiples of 16 bytes if `aligned`, else elsewhere.
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


class Product(NamedTuple):
    """Arguments of a product of batches of matrices.

    Attributes:
        into: gemm_accumulate_ adds it to this.
    """

    a: Tensor
    b: Tensor
    out_dtype: torch.dtype = FP32
    sum_batch: bool = False
    c: Tensor | None = None
    bias: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    into: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        batch, m = self.a.shape[:2]
        return (m, self.b.shape[2]) if self.sum_batch else (batch, m, self.b.shape[2])


def product(
    majors: str,
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype = FP32,
    *,
    dtype: torch.dtype | None = None,
    aligned: bool = True,
    batch: int = 1,
    make: Callable[..., Tensor] = integers,
    **options: Any,
) -> Product:
    """Return a product of small integers, or of the results of `make`, in these layouts."""
    dtype, (a_by_rows, b_by_rows) = dtype or TYPES[majors], MAJORS[majors]
    a = placed(make((batch, m, k), dtype, CPU), a_by_rows, aligned)
    b = placed(make((batch, k, n), dtype, CPU), b_by_rows, aligned)
    return Product(a, b, out_dtype, **options)


def product_for(tile: Tile, *sizes: Any, **options: Any) -> Product:
    """Return a product of operands that the tile takes."""
    return product(tile.majors, *sizes, aligned=tile.aligned, **options)


def compute(p: Product, library: Any = ops) -> Tensor:
    if p.into is not None:
        library.gemm_accumulate_(p.into, p.a, p.b, alpha=p.alpha, sum_batch=p.sum_batch)
        assert surroundings_are_intact(p.into)
        return p.into
    options = p._asdict()
    for name in ("a", "b", "into"):
        del options[name]
    return library.gemm(p.a, p.b, **options)


def run(
    product: Product,
    tile: Tile | None = None,
    *,
    sm90: bool = False,
    schedule: Schedule | None = None,
    **plan: Any,
) -> Tensor:
    """Compute a product, with this tile and splits, or else as the planner would.

    Args:
        sm90: on sm_90, where each launch has another tile.
        plan: arguments of Ptx.force_tile.
    """
    library = ptx()
    if schedule:
        library.pin(schedule)
    library.set_sm90(sm90 or (tile is not None and tile.sm90))
    if tile:
        library.force_tile(tile.sm90, tile.number, **plan)
    result = compute(product)
    assert tile is None or library.plan().startswith(tile.text), library.plan()
    library.force_tile()
    return result


def planned(pattern: str) -> int:
    """Return a number in the text of the last plan."""
    found = re.search(pattern, ptx().plan())
    assert found, ptx().plan()
    return int(found[1])


# ---- expected results --------------------------------------------------------------------------


def exact(p: Product) -> Tensor:
    """Return the oracle's result in float64; to be called before it is added to `into`."""
    doubles = {name: x.double() for name, x in p._asdict().items() if isinstance(x, Tensor)}
    return compute(p._replace(**doubles, out_dtype=torch.float64), reference)


def check(p: Product, tile: Tile | None = None, **how: Any) -> None:
    """Run a product of small integers; assert that all that comes out is exact."""
    expected = exact(p)
    assert_equal(run(p, tile, **how), expected)
