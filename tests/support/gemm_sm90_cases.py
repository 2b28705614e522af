"""Products for the GEMM kernel for sm_90a: an instance with each tile, and plans with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import simt_gemm
from executors import SIMT
from gemm_kernel_cases import BF16, FP16, FP32, MAJORS, library, product, run_plan, sm90_tiles
from simt.library import Schedule
from simt_gemm import Gemm, GemmPlan

OUT_TYPES = (FP32, FP16, BF16)
CLUSTERS = ((1, 1), (2, 1), (1, 2))  # blocks one below the other, and side by side

HEADER_BYTES, STEP, BOX_ROWS, BOX_COLUMNS = 3 << 10, 64, 64, 32  # as in amp_ext::Sm90Tile
MOST_STAGES, MOST_BOXES, SHARED_BYTES = 8, 8, 227 << 10

# What is tested with a tile, where it matters little what. simt/mutants/few has two of them.
MAJORS_OF_TILES = ("nn", "tn", "nt", "tt", "nt", "tt", "nn", "tn")
every_tile = pytest.mark.parametrize(
    "tile", range(len(sm90_tiles())), ids=[f"{tile.m}x{tile.n}" for tile in sm90_tiles()]
)


def dtype_of(tile: int) -> torch.dtype:
    return (FP16, BF16)[tile % 2]


def product_for(
    tile: int, m: int, n: int, k: int, out_dtype: torch.dtype = FP32, **options: Any
) -> Gemm:
    """Return a product of the tile's operands."""
    majors = MAJORS[MAJORS_OF_TILES[tile]]
    return product(m, n, k, dtype_of(tile), out_dtype, majors=majors, **options)


def tiles_of(tile: int, m: int, n: int) -> tuple[int, int]:
    """Return sizes of so many tiles, the last ones of a few rows and columns."""
    config = sm90_tiles()[tile]
    return (m - 1) * config.m + 5, (n - 1) * config.n + 9


def plan_sm90(
    gemm: Gemm,
    tile: int,
    cluster: tuple[int, int] = (1, 1),
    whole: int = 0,
    splits: int = 1,
    multiprocessors: int = 4,
) -> GemmPlan:
    args = gemm.args()
    assert simt_gemm.serves_sm90(library(), args)
    plan = simt_gemm.plan_sm90_with(library(), args, multiprocessors, tile, cluster, whole, splits)
    assert plan, "the tile does not serve the product"
    assert plan.splits <= plan.steps, "the kernel has no shares without steps"
    return plan


def run_sm90(
    gemm: Gemm, tile: int, *, schedule: Schedule | None = None, **options: Any
) -> GemmPlan:
    """Run a product by a plan of its own; return that."""
    schedule = schedule or SIMT.ops.next_schedule()
    plan = plan_sm90(gemm, tile, multiprocessors=schedule.multiprocessors, **options)
    run_plan(gemm, plan, schedule)
    return plan


def shared_bytes(plan: GemmPlan, out_dtype: torch.dtype, stages: int, boxes: int) -> int:
    tile = sm90_tiles()[plan.tile]
    box_bytes = BOX_ROWS * BOX_COLUMNS * out_dtype.itemsize
    return HEADER_BYTES + 2 * boxes * box_bytes + stages * (tile.m + tile.n) * STEP * 2


def by_hand(
    plan: GemmPlan, out_dtype: torch.dtype, counts: Iterator[tuple[int, int]]
) -> Iterator[GemmPlan]:
    """Yield the plan with each of these numbers of stages and boxes that fits."""
    for stages, boxes in counts:
        plan.shared_bytes = shared_bytes(plan, out_dtype, stages, boxes)
        plan.stages, plan.boxes = stages, boxes
        if plan.shared_bytes <= SHARED_BYTES:
            yield plan
