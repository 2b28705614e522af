"""The kernel of matrix products: persistent, with split sums and epilogue in one launch.

A matrix is a tuple: its address, and the strides of matrices, rows and columns. A layout is n > 0
for contiguous rows in aligned vectors of n elements, -n for contiguous columns, 0 for any strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from amp_ext.triton_kernels.launch import is_last, kernel
from amp_ext.triton_kernels.numerics import INTERPRETED, device_function, pointer, round_to, widen

GROUP = tl.constexpr(8)
"""Rows of tiles in a group: programs at work together share rows of a and columns of b."""


constant = (lambda value: value) if INTERPRETED.value else tl.constexpr
"""Makes a field of Form or Kind."""


@dataclass(frozen=True)
class Kind:
    """The dtype of a matrix, and its layout."""

    dtype: Any
    layout: int


@dataclass(frozen=True)
class Form:
    """The constants of a kernel. The kind of an absent matrix is None."""

    tile_m: int
    tile_n: int
    tile_k: int
    parts: int
    is_split: bool
    bias_dtype: Any
    out: Kind
    a: Kind
    b: Kind
    c: Kind | None


@device_function
def _times(index, stride, LAYOUT: tl.constexpr):
    # The compiler sees that the product is whole vectors.
    VECTOR: tl.constexpr = LAYOUT if LAYOUT > 0 else -LAYOUT
    if VECTOR > 1:
        return index.to(tl.int64) * (stride // VECTOR * VECTOR)
    else:
        return index.to(tl.int64) * stride


@device_function
def _at(matrix, index, rows, columns, KIND):
    # Returns pointers to rows x columns of matrix `index`.
    address, matrix_stride, row_stride, column_stride = matrix
    LAYOUT: tl.constexpr = KIND.layout
    data = pointer(address, KIND.dtype, LAYOUT > 1 or LAYOUT < -1)
    data += _times(index, matrix_stride, LAYOUT)
    if LAYOUT > 0:
        return data + (_times(rows, row_stride, LAYOUT)[:, None] + columns[None, :])
    elif LAYOUT < 0:
        return data + (_times(columns, column_stride, LAYOUT)[None, :] + rows[:, None])
    else:
        at_rows = _times(rows, row_stride, LAYOUT)
        return data + (at_rows[:, None] + _times(columns, column_stride, LAYOUT)[None, :])


@device_function
def _exists(rows, columns, row_count, column_count, LAYOUT: tl.constexpr):
    # Returns where rows x columns exist, the same for all of a vector.
    VECTOR: tl.constexpr = LAYOUT if LAYOUT > 0 else -LAYOUT
    if LAYOUT > 1:
        column_count = column_count // VECTOR * VECTOR
    elif LAYOUT < -1:
        row_count = row_count // VECTOR * VECTOR
    return (rows < row_count)[:, None] & (columns < column_count)[None, :]


@device_function
def _load(matrix, index, rows, columns, row_count, column_count, KIND):
    exists = _exists(rows, columns, row_count, column_count, KIND.layout)
    return tl.load(_at(matrix, index, rows, columns, KIND), mask=exists, other=0.0)


@device_function
def _store(matrix, index, rows, columns, row_count, column_count, x, KIND):
    exists = _exists(rows, columns, row_count, column_count, KIND.layout)
    tl.store(_at(matrix, index, rows, columns, KIND), round_to(x, KIND.dtype), mask=exists)


@device_function
def _load_operand(tensor_map, matrix, index, row, column, height, width, ROWS, COLUMNS, KIND):
    """Load the tile at (row, column), by TMA where there is a map; 0 beyond the edges."""
    if tensor_map is not None:
        at = tl.where(matrix[1] != 0, index, 0)  # a map has one matrix where all are the same
        if KIND.layout > 0:
            return tensor_map.load([at, row, column]).reshape(ROWS, COLUMNS)
        else:
            return tensor_map.load([at, column, row]).reshape(COLUMNS, ROWS).T
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        return _load(matrix, index, rows, columns, height, width, KIND)


@device_function
def _each_part(x, FIRST: tl.constexpr, COUNT: tl.constexpr, visit: tl.constexpr, arguments, F):
    """Call visit(part, its number, arguments, F) for the parts of x, side by side."""
    if COUNT == 1:
        visit(x, FIRST, arguments, F)
    else:
        HALF: tl.constexpr = COUNT // 2
        COLUMNS: tl.constexpr = x.shape[1] // 2
        halves = tl.permute(tl.reshape(x, (x.shape[0], 2, COLUMNS)), (0, 2, 1))
        left, right = tl.split(halves)
        _each_part(left, FIRST, HALF, visit, arguments, F)
        _each_part(right, FIRST + HALF, HALF, visit, arguments, F)


@device_function
def _share(shares, unit, part, F):
    # Returns pointers to a part of a unit's sums, a whole tile of fp32.
    WIDTH: tl.constexpr = F.tile_n // F.parts
    rows, columns = tl.arange(0, F.tile_m), part * WIDTH + tl.arange(0, WIDTH)
    first = tl.cast(unit, tl.int64) * (F.tile_m * F.tile_n)
    return pointer(shares, tl.float32, True) + (first + rows[:, None] * F.tile_n + columns[None, :])


@device_function
def _store_share(x, part, arguments, F):
    tl.store(_share(arguments[0], arguments[1], part, F), x)


@device_function
def _finish(x, part, arguments, F):
    """Scale, add c and bias, round and store a part of a tile."""
    place, sizes, factors, matrices, bias = arguments
    batch, tile_m, tile_n = place
    m, n = sizes
    out, c = matrices
    WIDTH: tl.constexpr = F.tile_n // F.parts
    rows = tile_m * F.tile_m + tl.arange(0, F.tile_m)
    columns = tile_n * F.tile_n + part * WIDTH + tl.arange(0, WIDTH)

    x = factors[0] * x
    if F.c is not None:
        addend = widen(_load(c, batch, rows, columns, m, n, F.c))
        x += factors[1] * addend.to(tl.float32)
    if F.bias_dtype is not None:
        addend = tl.load(pointer(bias, F.bias_dtype) + columns, mask=columns < n, other=0.0)
        x += widen(addend).to(tl.float32)[None, :]
    _store(out, batch, rows, columns, m, n, x, F.out)


@device_function
def _place_of(tile, tiles_m, tiles_n):
    # Walks groups of rows of tiles column by column.
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile = tile % (GROUP * tiles_n)
    return batch, first + tile % height, tile // height


@kernel
def gemm_kernel(
    scratch: tl.int64,
    tickets: tl.int64,
    out: tl.int64,
    a: tl.int64,
    b: tl.int64,
    c: tl.int64,
    bias: tl.int64,
    alpha: tl.float32,
    beta: tl.float32,
    a_map,
    b_map,
    batch: tl.int32,
    terms: tl.int32,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    splits: tl.int32,
    a_batch: tl.int64,
    a_row: tl.int64,
    a_column: tl.int64,
    b_batch: tl.int64,
    b_row: tl.int64,
    b_column: tl.int64,
    c_batch: tl.int64,
    c_row: tl.int64,
    c_column: tl.int64,
    out_batch: tl.int64,
    out_row: tl.int64,
    F: tl.constexpr,
):
    """Compute out = alpha * a @ b + beta * c + bias.

    Program i of p computes the units i, i + p, ...: tiles of the result, or splits of them. The
    last split of a tile adds the sums of all, in their order.

    Args:
        scratch: fp32: with splits, a tile for each unit.
        tickets: with splits, one for each tile.
        a, b: batch * terms matrices; a result sums `terms` of them; also as descriptors, or None.
    """
    tiles_m, tiles_n = tl.cdiv(m, F.tile_m), tl.cdiv(n, F.tile_n)
    tiles = batch * tiles_m * tiles_n
    steps_of_term = tl.cdiv(k, F.tile_k)
    steps = steps_of_term * terms
    tickets = pointer(tickets, tl.int32)
    a_matrix, b_matrix = (a, a_batch, a_row, a_column), (b, b_batch, b_row, b_column)
    matrices = ((out, out_batch, out_row, 1), (c, c_batch, c_row, c_column))

    for unit in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        split, tile = unit // tiles, unit % tiles
        index, tile_m, tile_n = _place_of(tile, tiles_m, tiles_n)
        m0, n0 = tile_m * F.tile_m, tile_n * F.tile_n
        # The first splits have one step more.
        more = steps % splits
        first = split * (steps // splits) + tl.minimum(split, more)
        after = first + steps // splits + (split < more).to(tl.int32)
        products = tl.zeros((F.tile_m, F.tile_n), tl.float32)
        for step in tl.range(first, after):
            term = step // steps_of_term
            k0 = (step - term * steps_of_term) * F.tile_k
            at = index * terms + term
            left = _load_operand(a_map, a_matrix, at, m0, k0, m, k, F.tile_m, F.tile_k, F.a)
            right = _load_operand(b_map, b_matrix, at, k0, n0, k, n, F.tile_k, F.tile_n, F.b)
            if INTERPRETED:
                products = tl.dot(widen(left), widen(right), products)
            else:
                products = tl.dot(left, right, products)

        arguments = ((index, tile_m, tile_n), (m, n), (alpha, beta), matrices, bias)
        if F.is_split:
            _each_part(products, 0, F.parts, _store_share, (scratch, unit), F)
            if is_last(tickets + tile, splits):
                for part in tl.range(0, F.parts):
                    shared = tl.zeros((F.tile_m, F.tile_n // F.parts), tl.float32)
                    for other in tl.range(tile, tiles * splits, tiles):
                        share = _share(scratch, other, part, F)
                        shared += tl.load(share, cache_modifier=".cg")
                    _finish(shared, part, arguments, F)
        else:
            _each_part(products, 0, F.parts, _finish, arguments, F)
