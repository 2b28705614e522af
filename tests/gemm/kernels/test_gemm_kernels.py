"""Test every instance of the GEMM kernels: shapes, schedules, splits, epilogues."""

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import assert_same, integers, normal
from executors import CPU, CUDA
from gemm_kernel_cases import (
    BF16,
    FP16,
    FP32,
    MAJORS,
    OUT_TYPES,
    SM80_TILES,
    SM90_TILES,
    TYPES,
    Product,
    Tile,
    check,
    every_majors,
    every_sm80_tile,
    every_sm90_tile,
    every_tile,
    every_type,
    is_sm90,
    placed,
    product,
    product_for,
    run,
)

pytestmark = pytest.mark.fake_cuda

# ---- shapes ------------------------------------------------------------------------------------

# 65 sizes of each of m, n and k in five combinations with the other sizes, any two of them in about
# 325 different pairs.
SHAPES = [
    (1 + i, 1 + (7 * i + 13 * j) % 65, 1 + (11 * i + 29 * j) % 65)
    for i in range(65)
    for j in range(5)
]


@every_tile
@every_majors
def test_tails(tile: Tile, majors: str) -> None:
    """Every tail is right, with few steps along k or with two rounds of the ring."""
    number = tile.number * len(MAJORS) + list(MAJORS).index(majors)
    for i, (m, n, k) in enumerate(SHAPES[number :: len(SM80_TILES) * len(MAJORS)]):
        k += i % 2 * 2 * tile.stages * tile.k
        splits = 1 + i % 3
        total = placed(integers((1, m, n), FP32, CPU))
        check(product(majors, m, n, k, aligned=tile.aligned, into=total), tile, splits=splits)
        n += -n % (8 if tile.sm90 else 1)  # TMA stores rows of whole 16 bytes
        gemm = product(majors, m, n, k, OUT_TYPES[i % 3], aligned=tile.aligned)
        check(gemm, tile, splits=splits)


@every_tile
@every_majors
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_instance(tile: Tile, dtype: torch.dtype, majors: str) -> None:
    """Every instance computes tiles at every edge, with partial last steps along k."""
    number = tile.number + list(MAJORS).index(majors) + (dtype == BF16)
    sizes = *tile.of(3 if not tile.sm90 else 2, 2), 3 * tile.k + 7
    gemm = product(majors, *sizes, OUT_TYPES[number % 3], dtype=dtype, aligned=tile.aligned)
    check(gemm, tile)


@every_sm80_tile
@pytest.mark.parametrize("seed", range(12))
def test_every_schedule(tile: Tile, seed: int) -> None:
    """Every schedule passes through the ring of stages four times."""
    k = 4 * tile.stages * tile.k - 7
    gemm = product(("nn", "tt")[seed % 2], 20, 30, k, aligned=tile.aligned)
    check(gemm, tile, splits=1 + seed // 2 % 2, seed=seed)


# ---- layouts, batches, sums of products ---------------------------------------------------------


@every_tile
@pytest.mark.parametrize(("batch", "sum_batch"), [(3, False), (4, True)], ids=["batch", "sum"])
def test_batches_and_sums(tile: Tile, batch: int, sum_batch: bool) -> None:
    for steps, splits in itertools.product((1, 3), (1, 3, 2)):
        sizes = 19, 24, steps * tile.k - 3
        gemm = product_for(tile, *sizes, batch=batch, sum_batch=sum_batch)
        check(gemm, tile, splits=splits)


@pytest.mark.parametrize("tile", [SM80_TILES[0], SM90_TILES[0]], ids=["sm80", "sm90"])
def test_strides_of_single_elements_mean_nothing(tile: Tile) -> None:
    """Products with odd strides of single elements count as aligned."""
    assert tile.aligned

    def odd(t: Tensor) -> Tensor:
        sizes = zip(t.shape[1:], t.stride()[1:], strict=True)
        return t.as_strided(t.shape, (7, *(3 if size == 1 else by for size, by in sizes)))

    for sizes in itertools.product((1, 40), repeat=3):
        if tile.sm90 and sizes[1] == 1:
            continue  # TMA stores no such rows
        gemm = product("nn", *sizes)
        check(gemm._replace(a=odd(gemm.a), b=odd(gemm.b)), tile)


# ---- determinism, economy ----------------------------------------------------------------------


@every_tile
@pytest.mark.parametrize("splits", [1, 4])
def test_results_are_the_same_in_every_schedule(tile: Tile, splits: int) -> None:
    plain = product_for(tile, *tile.of(2, 2), 9 * tile.k, make=normal)
    for gemm in (plain, plain._replace(c=normal(plain.shape, FP32, CUDA))):
        results = [
            run(gemm, tile, seed=seed, multiprocessors=2 + seed, splits=splits)[0]
            for seed in range(6)
        ]
        for result in results:
            assert_same(result, results[0])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_memory_is_moved_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    """Each tile reads its rows of a and columns of b once; the result is stored once."""
    m, n, k = 128, 256, 96
    for majors, out_dtype in itertools.product(MAJORS, OUT_TYPES):
        counted = check(product(majors, m, n, k, out_dtype, dtype=dtype), SM80_TILES[1])
        assert (counted.launches, counted.blocks) == (1, 2)
        assert counted.bytes_copied == 2 * (128 + 128) * k * 2
        assert counted.bytes_stored == m * n * out_dtype.itemsize


# ---- epilogues ---------------------------------------------------------------------------------

SIDES = ("plain", "c", "in-place")


def values(gemm: Product, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    return placed(integers(gemm.shape, dtype, CPU), aligned=aligned)


def with_side(gemm: Product, side: str, tile: Tile, bias_dtype: torch.dtype) -> Product:
    """Return the product with all possible addends beside a second matrix of this kind."""
    other_dtype = gemm.out_dtype if tile.sm90 else bias_dtype
    gemm = gemm._replace(alpha=0.5)
    if side == "in-place":
        return gemm._replace(into=values(gemm, FP32, tile.aligned))
    bias = integers((gemm.shape[-1],), bias_dtype, CUDA)
    gemm = gemm._replace(bias=bias)
    return gemm if side == "plain" else gemm._replace(c=values(gemm, other_dtype), beta=-2.0)


@every_tile
@every_type
@pytest.mark.parametrize("side", SIDES)
def test_all_at_once(tile: Tile, dtype: torch.dtype, side: str) -> None:
    """All epilogues work at once on several tiles, by one block or several, whole or in shares."""
    number = SIDES.index(side) + OUT_TYPES.index(dtype)
    for splits in (1, 2):
        sizes = *tile.of(2, 2), 2 * tile.k - 5
        gemm = product_for(tile, *sizes, dtype, batch=1 + number % 2)
        gemm = with_side(gemm, side, tile, OUT_TYPES[(number + splits) % 3])
        multiprocessors = (2, 5)[number % 2]
        check(gemm, tile, splits=splits, seed=number + splits, multiprocessors=multiprocessors)


@every_sm90_tile
@every_type
@pytest.mark.parametrize("side", SIDES)
def test_boxes(tile: Tile, dtype: torch.dtype, side: str) -> None:
    """Boxes of many parts of tiles, at edges and inside, pass through the boxes of one block."""
    for seed, sizes in enumerate(((tile.m, tile.n), tile.of(3, 2), tile.of(2, 3))):
        gemm = with_side(product_for(tile, *sizes, tile.k, dtype, batch=2), side, tile, FP32)
        check(gemm, tile, seed=seed, multiprocessors=1)


@every_sm90_tile
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_memory_system_accumulates(tile: Tile, alpha: float) -> None:
    """The memory system accumulates: the kernel does not read the matrix it adds to."""
    for splits in (1, 3):
        gemm = product_for(tile, *tile.of(2, 2), 3 * tile.k, batch=2, alpha=alpha)
        plain = check(gemm, tile, splits=splits)
        added = check(gemm._replace(into=values(gemm, FP32)), tile, splits=splits)
        assert added.bytes_copied == plain.bytes_copied


# ---- the pipeline of sm_90a ----------------------------------------------------------------------

SEEDS = range(6)  # asynchronous copies are early, late and at random by turns
BOX_ROWS = 64  # as in amp_ext::Sm90Tile


@every_sm90_tile
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule_of_sm90(tile: Tile, seed: int) -> None:
    """Each block passes through the ring several times on its way through its tiles."""
    for blocks, sizes in ((1, tile.of(2, 3)), (2, tile.of(4, 1))):
        gemm = product_for(tile, *sizes, (7 + seed) * tile.k - 7, OUT_TYPES[seed % 3])
        assert check(gemm, tile, seed=seed, multiprocessors=blocks).blocks == blocks


@every_sm90_tile
@pytest.mark.parametrize("seed", range(3))
def test_a_tile_for_each_way_through_the_ring(tile: Tile, seed: int) -> None:
    """A tile's first step takes the stage of an earlier tile's, of the waiting consumer."""
    for steps in range(2, 9):
        gemm = product_for(tile, *tile.of(3, 1), steps * tile.k)
        check(gemm, tile, seed=seed, multiprocessors=1)


@every_sm90_tile
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_shares_of_unequal_numbers_of_steps(tile: Tile, splits: int) -> None:
    """Each block has one share or several, whose numbers of steps differ."""
    for blocks in (2, 3, 5):
        gemm = product_for(tile, *tile.of(2, 2), 7 * tile.k - 3)
        how = {"splits": splits, "seed": blocks + splits, "multiprocessors": blocks}
        counted = check(gemm, tile, **how)
        assert counted.bytes_stored == 4 * splits * tile.m * tile.n * 4, "all shares of FP32 sums"


def test_a_refused_tensor_map_is_not_the_end() -> None:
    """After a refused tensor map torch's library computes the product, and a warning says so."""
    if not is_sm90():
        pytest.skip("the kernel for sm_80 has no tensor maps")
    a, b = (torch.ones(size, dtype=FP16, device=CUDA) for size in ((128, 64), (64, 256)))
    refuse = ctypes.CDLL(None).fake_cuda_refuse_tensor_maps
    refuse(ctypes.c_bool(True))
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="the driver refused a tensor map"):
            result = ops.gemm(a, b)
    finally:
        torch.set_warn_always(False)
        refuse(ctypes.c_bool(False))
    assert (result == 64).all()


def boxes_of(extent: int, tile_extent: int, box: int) -> int:
    """Return how many boxes cover the part of a matrix's extent that tiles cover."""
    whole, rest = divmod(extent, tile_extent)
    return whole * (tile_extent // box) + -(-rest // box)


@every_sm90_tile
def test_memory_is_moved_as_planned(tile: Tile) -> None:
    """Each block fetches its own boxes, stores boxes with elements, and stores its shares' sums.

    Plain results have boxes with rows of 128 bytes.
    """
    m, n = tile.of(2, 2)
    steps, dtype = 3, TYPES[tile.majors]
    step_bytes = (tile.m + tile.n) * tile.k * 2
    for splits, c in itertools.product((1, 2), (None, placed(torch.ones(1, m, n, dtype=dtype)))):
        gemm = product_for(tile, m, n, steps * tile.k, dtype, c=c)
        counted = check(gemm, tile, splits=splits, seed=splits, multiprocessors=3)
        assert (counted.launches, counted.blocks) == (1, 3)
        columns = 64 if c is None else 32
        boxes = boxes_of(m, tile.m, BOX_ROWS) * boxes_of(n, tile.n, columns)
        box_bytes = BOX_ROWS * columns * 2
        moved = 4 * steps * step_bytes + (1 + (c is not None)) * boxes * box_bytes
        assert counted.bytes_copied == moved
        shares = 4 * splits * (splits > 1)
        assert counted.bytes_stored == shares * tile.m * tile.n * 4
