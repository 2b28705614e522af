"""Test the planner, csrc/kernels/gemm/plan: plans, choices, variants, limits of kernels."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import _C
from amp_ext.ops.gemm import Plan
from executors import CUDA
from fake_cuda.recorder import cost
from gemm_kernel_cases import BF16, FP16, FP32, Product, check, compute, is_sm90, placed, product
from planner import broken_plan, gemm_tiles, plan


@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_plan_computes_each_step_once_and_fits(seed: int, sm90: bool) -> None:
    """Plans of random products keep the invariants of support/planner.cpp."""
    assert broken_plan(seed, sm90) == ""


# ---- choices -----------------------------------------------------------------------------------


LARGE = {(256, 128), (128, 128)}


@pytest.mark.parametrize(
    ("shape", "extents", "is_split"),
    [
        ((8192, 50304, 768), LARGE, False),
        ((768, 3072, 65536), LARGE, True),
        ((1, 4096, 4096), {(16, 128)}, True),
        ((4096, 8, 4096), {(128, 16)}, True),
        ((256, 256, 16384), {(64, 64), (128, 64), (64, 128), (128, 128)}, True),
    ],
)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_choices_for_sm80(
    shape: tuple[int, int, int], extents: set[tuple[int, int]], is_split: bool, layout: str
) -> None:
    """Many tiles are large; skinny results get narrow tiles and splits."""
    found = plan(*shape, layout, multiprocessors=108, sm90=False)
    assert found.tile[:2] in extents and found.is_split == is_split, found


def test_the_gradient_of_a_small_weight_is_split() -> None:
    """Few tiles with many steps are split among most multiprocessors."""
    found = plan(512, 512, 65536, "TN", fp32_out=True)
    assert found.sm90 and found.is_split and found.blocks >= 0.7 * 132, found


@pytest.mark.parametrize("shape", [(8192, 8192), (2048, 16384), (16384, 2048)])
@pytest.mark.parametrize("sm90", [False, True])
def test_tiles_computed_together_are_about_a_square(shape: tuple[int, int], sm90: bool) -> None:
    """Tiles computed together form about a square, and read few rows of a and columns of b."""
    found = plan(*shape, 4096, sm90=sm90)
    columns = min(-(-132 // found.group), found.tiles[1])
    rows = -(-132 // columns)
    m, n, _ = found.tile
    assert rows * m + columns * n <= 1.5 * 2 * (132 * m * n) ** 0.5, found


@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize("shape", [(2**30, 64, 64), (64, 2**30, 64), (2048, 2048, 2**30)])
def test_huge_sizes(shape: tuple[int, int, int], sm90: bool) -> None:
    """Huge sizes overflow no number of the planner."""
    found = plan(*shape, sm90=sm90)
    counts = [-(-size // of) for size, of in zip(shape, found.tile, strict=True)]
    assert [*found.tiles] == counts[:2] and f" {counts[2]} steps" in found.text
    assert found.sm90 or found.is_split or found.blocks == counts[0] * counts[1]


# TFLOP/s of tiles, by number, on an H100, timed in turn.
MEASURED = {
    (4096, 4096, 4096, "NT"): {0: 745, 1: 732, 2: 653, 3: 662},
    (4096, 6144, 4096, "NT"): {0: 655, 1: 647, 2: 645, 3: 633},
    (4096, 3072, 2048, "NT"): {0: 617, 1: 609, 2: 612, 3: 602},
    (12608, 3072, 768, "NT"): {0: 562, 1: 506, 2: 553, 3: 573},
    (12608, 768, 3072, "NN"): {0: 502, 1: 515, 2: 685, 3: 620},
    (2048, 2048, 2048, "NT"): {0: 639, 1: 639, 2: 448, 3: 603},
    (16384, 2048, 4096, "TN"): {0: 636, 1: 585, 2: 617, 3: 616},
}


@pytest.mark.parametrize("product", MEASURED, ids=str)
def test_predictions_are_near_measurements(product: tuple[int, int, int, str]) -> None:
    """Predicted rates are within 12% of an H100's, and the choice is nearly its fastest."""
    m, n, k, layout = product
    options = {"fp32_out": layout == "TN"}
    rates = MEASURED[product]
    for tile, rate in rates.items():
        cycles = plan(m, n, k, layout, **options, tile=tile).cycles
        predicted = 2 * m * n * k / (cycles / 1.6e9) / 1e12  # at the clock of its power limit
        assert 0.88 <= predicted / rate <= 1.12, f"{tile}: {predicted:.0f} TFLOP/s, not {rate}"
    text = plan(m, n, k, layout, **options).text
    chosen = next(i for i, tile in enumerate(gemm_tiles(sm90=True)) if text.startswith(tile))
    assert rates[chosen] >= 0.97 * max(rates.values()), text


# ---- variants ----------------------------------------------------------------------------------


def test_the_tile_of_a_variant() -> None:
    """The tile computes every product that it can, with at most as many splits as steps."""
    found = plan(4096, 4096, 4096, "NT", tile=4, splits=2)
    assert found.text.startswith("sm90 tile 64x256x64, ping-pong") and " 2 splits" in found.text
    assert not plan(4096, 4096, 4096, "NT", sm90=False, tile=4, splits=2).sm90
    assert not plan(64, 64, 64, tile=4, splits=2).is_split


@pytest.mark.parametrize("sm90", [False, True])
def test_the_variants_of_tiles(sm90: bool) -> None:
    """Tiles have variants of their own, and no others have any, nor other numbers of splits."""
    count = len(gemm_tiles(sm90))
    variants = {_C.gemm_variant(i, splits, sm90) for i in range(count) for splits in (1, 255)}
    assert len(variants - {0}) == (2 * count if _C.cuda_built() else 0)
    for wrong in ((count, 1), (-1, 1), (0, 0), (0, 256)):
        assert _C.gemm_variant(*wrong, sm90) == 0


# ---- limits of the kernels ---------------------------------------------------------------------


def small(**fields: Any) -> Product:
    return product("nn", 64, 64, 64, FP16)._replace(**fields)


def operand(dtype: torch.dtype = FP16, gap: int = 8, at: int = 8) -> Tensor:
    """Return a matrix with gaps between its rows, at a place in memory."""
    memory = torch.ones(at + 64 * (64 + gap), dtype=dtype, device=CUDA)
    return memory.as_strided((1, 64, 64), (0, 64 + gap, 1), at)


def side(dtype: torch.dtype = FP16, by_rows: bool = True, aligned: bool = True) -> Tensor:
    return placed(torch.ones(1, 64, 64, dtype=dtype), by_rows, aligned)


def bias(dtype: torch.dtype) -> Tensor:
    return torch.ones(64, dtype=dtype, device=CUDA)


NOT_FOR_THE_KERNELS: dict[str, Callable[[], Product]] = {
    "a of FP32": lambda: small(a=operand(FP32)),
    "b of another dtype": lambda: small(b=operand(BF16)),
    "strides of a": lambda: small(a=operand()[:, :, ::2], b=operand()[:, ::2]),
    "strides of b": lambda: small(b=operand(gap=64).repeat(1, 1, 2)[:, :, ::2]),
    "FP64 out": lambda: small(out_dtype=torch.float64),
    "FP64 c": lambda: small(c=side(torch.float64)),
    "FP64 bias": lambda: small(bias=bias(torch.float64)),
}


@pytest.mark.fake_cuda
@pytest.mark.parametrize("name", NOT_FOR_THE_KERNELS)
def test_not_for_the_kernels(name: str) -> None:
    """The op computes what the kernels do not read without a launch, and a plan refuses it."""
    product = NOT_FOR_THE_KERNELS[name]()
    assert cost(compute, product).launches == 0
    with pytest.raises(ValueError, match="cuda cannot compute this: the kernels take no such"):
        compute(product, Plan("cuda"))


NOT_FOR_SM90: dict[str, Callable[[], Product]] = {
    "a misaligned": lambda: small(a=operand(at=9)),
    "odd rows": lambda: small(a=operand(gap=1)),
    "one row": lambda: small(a=operand()[:, :1].expand(1, 64, 64)),
    "overlapping matrices": lambda: small(
        a=operand().as_strided((2, 64, 64), (4, 72, 1)), b=side().expand(2, 64, 64)
    ),
    "odd rows of out": lambda: product("nn", 64, 68, 64, FP16),
    "c of another dtype": lambda: small(c=side(FP32)),
    "c by columns": lambda: small(c=side(by_rows=False)),
    "c misaligned": lambda: small(c=side(aligned=False)),
    "no k": lambda: product("nn", 64, 64, 0, FP16),
}
FOR_SM90: dict[str, Callable[[], Product]] = {
    "plain": small,
    "one row of out": lambda: product("nn", 1, 68, 64, FP16),
    "a repeated matrix": lambda: product("nn", 64, 64, 64, FP16, batch=2)._replace(
        a=side().expand(2, 64, 64)
    ),
    "c": lambda: small(c=side()),
    "c of wider matrices": lambda: product("nn", 70, 40, 64, FP16, batch=3)._replace(
        c=placed(torch.ones(6, 75, 56, dtype=FP16))[::2, 5:, 16:], beta=2.0
    ),
}


@pytest.mark.fake_cuda
@pytest.mark.parametrize("name", [*NOT_FOR_SM90, *FOR_SM90])
def test_for_sm90(name: str) -> None:
    """Products are right, and the kernel for sm_90a takes those whose memory TMA can address."""
    kernel = check((NOT_FOR_SM90 | FOR_SM90)[name]()).kernel
    found = re.findall(rb"::(gemm_\w+)<", kernel)
    assert found == ([b"gemm_sm90_kernel"] * (name in FOR_SM90) if is_sm90() else [b"gemm_kernel"])
