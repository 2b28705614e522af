"""Run products on the CUDA kernels of the fake runtime: operands, computation and results.

Operands are placed in memory with a given layout.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import _C, ops
from amp_ext.ops.gemm import Plan
from cases import assert_equal, integers, surroundings
from executors import CPU, CUDA
from fake_cuda.recorder import Cost, cost, schedule
from planner import gemm_tiles

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
OUT_TYPES = (FP32, FP16, BF16)
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


def is_sm90() -> bool:
    """Tell whether the kernel for sm_90a computes the products that it can, and no other does."""
    return torch.cuda.get_device_capability() == (9, 0)


# ---- products ----------------------------------------------------------------------------------


def placed(matrices: Tensor, rows_are_contiguous: bool = True, aligned: bool = True) -> Tensor:
    """Return a batch of matrices on the device as a view of other memory, with NaN between lines.

    Lines (rows or columns) begin at multiples of 16 bytes if `aligned`, else elsewhere. The memory
    ends with the last line.
    """
    lines = matrices if rows_are_contiguous else matrices.mT
    batch, count, length = lines.shape
    before = 8 if aligned else 1
    whole = -(-(length + 16) // 8) * 8 + (0 if aligned else 3)
    end = before + (batch * count - 1) * whole + length
    memory = torch.full((max(end, before),), SURROUNDINGS, dtype=lines.dtype, device=CUDA)
    view = memory.as_strided(lines.shape, (count * whole, whole, 1), before).copy_(lines)
    return view if rows_are_contiguous else view.mT


def surroundings_are_intact(view: Tensor) -> bool:
    """Tell whether nothing has been written around a view that `placed` returned."""
    memory = surroundings(view).clone()
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
    splits: int = 1,
    seed: int | None = None,
    multiprocessors: int | None = None,
) -> tuple[Tensor, Cost]:
    """Compute a product, with this tile and splits, or else by the op.

    Args:
        seed: of the schedule; each launch has another one if it is None.
    """
    if tile and tile.sm90 != is_sm90():
        pytest.skip("another compute capability has this kernel")
    results: list[Tensor] = []
    library = Plan("cuda", _C.gemm_variant(tile.number, splits, tile.sm90)) if tile else ops
    chosen = contextlib.nullcontext() if seed is None else schedule(seed, multiprocessors)
    with chosen:
        counted = cost(lambda: results.append(compute(product, library)))
    name = counted.kernel.decode()
    if tile:
        kernel = "gemm_sm90_kernel" if tile.sm90 else "gemm_kernel"
        assert re.search(rf"::{kernel}<\w+, {tile.number},", name), name
    return results[0], counted


# ---- expected results --------------------------------------------------------------------------


def exact(p: Product) -> Tensor:
    """Return the oracle's result in float64; to be called before it is added to `into`."""
    doubles = {name: x.double().cpu() for name, x in p._asdict().items() if isinstance(x, Tensor)}
    return compute(p._replace(**doubles, out_dtype=torch.float64), reference)


def check(p: Product, tile: Tile | None = None, **how: Any) -> Cost:
    """Run a product of small integers; assert an exact result, and return the cost."""
    expected = exact(p)
    result, counted = run(p, tile, **how)
    assert_equal(result, expected)
    return counted
