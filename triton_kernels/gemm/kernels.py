"""The GEMM's kernels: sums of products by tiles, shares of sums added up, and sums of columns."""

from __future__ import annotations

import triton
import triton.language as tl
from amp_ext.triton_kernels.gemm.epilogue import finish, inside, offsets_of, times
from amp_ext.triton_kernels.numerics import INTERPRETED, device_function, widen

_STRIDES = (
    *("a_batch", "a_term", "a_row", "a_column", "b_batch", "b_term", "b_row", "b_column"),
    *("out_batch", "out_row", "c_batch", "c_row", "c_column", "aux_batch", "aux_row", "aux_column"),
    *("share_stride", "share_batch", "share_row", "row_stride"),
)
_COUNTS = ("m", "n", "k", "units", "steps", "steps_of_term", "splits", "tiles_m", "tiles_n")
RUNTIME = (*_STRIDES, *_COUNTS, "group", "rows", "columns")
"""Numbers for all values of which there is one compiled kernel."""
SINGLE = ("bias", "column_sums")
"""Of each a program takes little: no kernel more for addresses that are aligned."""


@device_function
def _place_of(tile, tiles_m, tiles_n, group):
    # Groups of rows of tiles: those at work at the same time share rows of a and columns of b.
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    first = tile // (group * tiles_n) * group
    height = tl.minimum(tiles_m - first, group)
    tile = tile % (group * tiles_n)
    return batch, first + tile % height, tile // height


@device_function
def _load_tile(
    x,
    offsets,
    at,
    row,
    column,
    row_count,
    column_count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    # at: which of a descriptor's matrices, or where the tile starts.
    if TMA and LAYOUT > 0:
        return x.load([at.to(tl.int32), row, column]).reshape(ROWS, COLUMNS)
    elif TMA:
        return x.load([at.to(tl.int32), column, row]).reshape(COLUMNS, ROWS).T
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        exists = inside(rows, columns, row_count, column_count, LAYOUT)
        return tl.load(x + at + offsets, mask=exists, other=0.0)


@device_function
def _steps_of(split, steps, splits):
    # The first ones have one more.
    each = steps // splits
    more = steps % splits
    return split * each + tl.minimum(split, more), each + (split < more).to(tl.int32)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SINGLE)
def gemm_kernel(
    a,
    a_batch: tl.int64,
    a_term: tl.int64,
    a_row: tl.int64,
    a_column: tl.int64,
    b,
    b_batch: tl.int64,
    b_term: tl.int64,
    b_row: tl.int64,
    b_column: tl.int64,
    out,
    out_batch: tl.int64,
    out_row: tl.int64,
    c,
    c_batch: tl.int64,
    c_row: tl.int64,
    c_column: tl.int64,
    bias,
    aux,
    aux_batch: tl.int64,
    aux_row: tl.int64,
    aux_column: tl.int64,
    column_sums,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    units: tl.int32,
    steps: tl.int32,
    steps_of_term: tl.int32,
    splits: tl.int32,
    tiles_m: tl.int32,
    tiles_n: tl.int32,
    group: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    TERMS: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    A_LAYOUT: tl.constexpr,
    B_LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr,
    C_LAYOUT: tl.constexpr,
    AUX_LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """Program i of p computes the units i, i + p, ...: tiles of the result, or splits of them.

    Args:
        a, b: a descriptor of three dimensions, then the strides of batch and term count matrices;
            or a pointer.
        out, ..., column_sums: as for `finish`; with SPLIT, out is a batch of whole tiles for each
            split.
        units: tiles of the result * splits.
        steps: steps along k of a tile; each of its terms has steps_of_term of them.
    """
    # Of matrices in a descriptor the numbers count, not the addresses.
    A_VECTORS: tl.constexpr = 0 if A_TMA else A_LAYOUT
    B_VECTORS: tl.constexpr = 0 if B_TMA else B_LAYOUT
    tiles = units // splits
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        split = unit // tiles
        batch, tile_m, tile_n = _place_of(unit % tiles, tiles_m, tiles_n, group)
        m0 = tile_m * TILE_M
        n0 = tile_n * TILE_N
        rows = tl.arange(0, TILE_M)
        columns = tl.arange(0, TILE_N)
        inner = tl.arange(0, TILE_K)
        a_offsets = 0
        b_offsets = 0
        if not A_TMA:
            a_offsets = offsets_of(m0 + rows, inner, a_row, a_column, A_LAYOUT)
        if not B_TMA:
            b_offsets = offsets_of(inner, n0 + columns, b_row, b_column, B_LAYOUT)
        a_matrix = times(batch, a_batch, A_VECTORS)
        b_matrix = times(batch, b_batch, B_VECTORS)

        products = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        first, count = _steps_of(split, steps, splits)
        for step in tl.range(first, first + count):
            k0 = step * TILE_K
            a_at = a_matrix
            b_at = b_matrix
            if TERMS:
                term = step // steps_of_term
                k0 = (step - term * steps_of_term) * TILE_K
                a_at += times(term, a_term, A_VECTORS)
                b_at += times(term, b_term, B_VECTORS)
            if not A_TMA:
                a_at += k0 if A_LAYOUT > 0 else times(k0, a_column, A_LAYOUT)
            if not B_TMA:
                b_at += k0 if B_LAYOUT < 0 else times(k0, b_row, B_LAYOUT)
            left = _load_tile(a, a_offsets, a_at, m0, k0, m, k, TILE_M, TILE_K, A_TMA, A_LAYOUT)
            right = _load_tile(b, b_offsets, b_at, k0, n0, k, n, TILE_K, TILE_N, B_TMA, B_LAYOUT)
            if INTERPRETED:
                products = tl.dot(widen(left), widen(right), products)
            else:
                products = tl.dot(left, right, products)

        height = m
        width = n
        if SPLIT:
            batch += split * (tiles // (tiles_m * tiles_n))
            height = tiles_m * TILE_M
            width = tiles_n * TILE_N
        finish(
            products,
            (batch, tile_m, tile_n),
            (height, width, tiles_m, tiles_n),
            (alpha, beta),
            (out, out_batch, out_row),
            (c, c_batch, c_row, c_column),
            bias,
            (aux, aux_batch, aux_row, aux_column),
            column_sums,
            0,
            PARTS,
            PARTS,
            OUT_LAYOUT,
            C_LAYOUT,
            AUX_LAYOUT,
            ACTIVATION,
            DERIVATIVE,
        )


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SINGLE)
def add_shares_kernel(
    shares,
    share_stride: tl.int64,
    share_batch: tl.int64,
    share_row: tl.int64,
    out,
    out_batch: tl.int64,
    out_row: tl.int64,
    c,
    c_batch: tl.int64,
    c_row: tl.int64,
    c_column: tl.int64,
    bias,
    aux,
    aux_batch: tl.int64,
    aux_row: tl.int64,
    aux_column: tl.int64,
    column_sums,
    m: tl.int32,
    n: tl.int32,
    splits: tl.int32,
    tiles_m: tl.int32,
    tiles_n: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OUT_LAYOUT: tl.constexpr,
    C_LAYOUT: tl.constexpr,
    AUX_LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """Add up the splits' shares of a tile, in their order, and finish it as `gemm_kernel` does.

    Args:
        shares: fp32, with strides of a split, of a matrix and of a row, which are of whole tiles.
        out, ..., DERIVATIVE: as for `gemm_kernel`.
    """
    batch, tile_m, tile_n = _place_of(tl.program_id(0), tiles_m, tiles_n, 1)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n * TILE_N + tl.arange(0, TILE_N)
    at = shares + times(batch, share_batch, 4) + offsets_of(rows, columns, share_row, 1, 4)
    products = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for _ in tl.range(0, splits):
        products += tl.load(at)
        at += share_stride // 4 * 4
    finish(
        products,
        (batch, tile_m, tile_n),
        (m, n, tiles_m, tiles_n),
        (alpha, beta),
        (out, out_batch, out_row),
        (c, c_batch, c_row, c_column),
        bias,
        (aux, aux_batch, aux_row, aux_column),
        column_sums,
        0,
        1,
        1,
        OUT_LAYOUT,
        C_LAYOUT,
        AUX_LAYOUT,
        ACTIVATION,
        DERIVATIVE,
    )


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("out",))
def add_rows_kernel(
    x,
    out,
    rows: tl.int32,
    columns: tl.int32,
    row_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = the sums of x's columns, in the same order always."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=x.dtype.element_ty)
    for first in tl.range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        exists = (row < rows)[:, None] & (at < columns)[None, :]
        sums += tl.load(x + offsets_of(row, at, row_stride, 1, 1), mask=exists, other=0.0)
    tl.store(out + at, tl.sum(sums, axis=0), mask=at < columns)
