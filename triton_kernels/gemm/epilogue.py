"""From sums of products to the result: scaling, c, bias, activation or its derivative, rounding,
and the sums of its columns. Matrices are tuples (data, strides...), data None where absent.

A matrix's LAYOUT says how it lies in memory: n > 0, columns side by side, in aligned vectors of n;
n < 0, rows side by side, in vectors of -n; 0, any strides.
"""

from __future__ import annotations

import triton.language as tl
from amp_ext.triton_kernels.gemm.activation import activate, times_derivative
from amp_ext.triton_kernels.numerics import device_function, round_to, widen


@device_function
def times(index, stride, LAYOUT: tl.constexpr):
    """Return index * stride, for the compiler to see that it is whole vectors."""
    VECTOR: tl.constexpr = LAYOUT if LAYOUT > 0 else -LAYOUT
    if VECTOR > 1:
        return index.to(tl.int64) * (stride // VECTOR * VECTOR)
    else:
        return index.to(tl.int64) * stride


@device_function
def offsets_of(rows, columns, row_stride, column_stride, LAYOUT: tl.constexpr):
    """Return the offsets of rows x columns."""
    if LAYOUT > 0:
        return times(rows, row_stride, LAYOUT)[:, None] + columns[None, :]
    elif LAYOUT < 0:
        return times(columns, column_stride, LAYOUT)[None, :] + rows[:, None]
    else:
        return times(rows, row_stride, 0)[:, None] + times(columns, column_stride, 0)[None, :]


@device_function
def inside(rows, columns, row_count, column_count, LAYOUT: tl.constexpr):
    """Return where rows x columns exist, the same for all of a vector."""
    VECTOR: tl.constexpr = LAYOUT if LAYOUT > 0 else -LAYOUT
    if LAYOUT > 1:
        column_count = column_count // VECTOR * VECTOR
    elif LAYOUT < -1:
        row_count = row_count // VECTOR * VECTOR
    return (rows < row_count)[:, None] & (columns < column_count)[None, :]


@device_function
def _load(matrix, batch, rows, columns, m, n, LAYOUT: tl.constexpr):
    data = matrix[0] + times(batch, matrix[1], LAYOUT)
    offsets = offsets_of(rows, columns, matrix[2], matrix[3], LAYOUT)
    return widen(tl.load(data + offsets, mask=inside(rows, columns, m, n, LAYOUT), other=0.0))


@device_function
def _store(matrix, batch, rows, columns, m, n, rounded, LAYOUT: tl.constexpr):
    data = matrix[0] + times(batch, matrix[1], LAYOUT)
    offsets = offsets_of(rows, columns, matrix[2], 1, LAYOUT)
    tl.store(data + offsets, rounded, mask=inside(rows, columns, m, n, LAYOUT))


@device_function
def _finish_part(
    x,
    place,
    sizes,
    factors,
    out,
    c,
    bias,
    aux,
    column_sums,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    OUT_LAYOUT: tl.constexpr,
    C_LAYOUT: tl.constexpr,
    AUX_LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    TILE_M: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    batch, tile_m, tile_n = place[0], place[1], place[2]
    m, n, tiles_m, tiles_n = sizes[0], sizes[1], sizes[2], sizes[3]
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n * (WIDTH * PARTS) + PART * WIDTH + tl.arange(0, WIDTH)

    x = factors[0] * x
    if c[0] is not None:
        x += factors[1] * _load(c, batch, rows, columns, m, n, C_LAYOUT).to(tl.float32)
    if bias is not None:
        BIAS_LAYOUT: tl.constexpr = OUT_LAYOUT if OUT_LAYOUT > 0 else 1
        row = tl.arange(0, 1)
        x += _load((bias, 0, 0, 1), batch, row, columns, 1, n, BIAS_LAYOUT).to(tl.float32)
    if DERIVATIVE:
        x = times_derivative(x, _load(aux, batch, rows, columns, m, n, AUX_LAYOUT), ACTIVATION)
    else:
        if aux[0] is not None:
            kept = round_to(x, aux[0].dtype.element_ty)
            _store(aux, batch, rows, columns, m, n, kept, AUX_LAYOUT)
        x = activate(x, ACTIVATION)
    rounded = round_to(x, out[0].dtype.element_ty)
    _store(out, batch, rows, columns, m, n, rounded, OUT_LAYOUT)

    if column_sums is not None:
        exists = inside(rows, columns, m, n, 0)
        row_of_tiles = batch.to(tl.int64) * tiles_m + tile_m
        of_columns = tl.sum(tl.where(exists, x, 0.0), axis=0)
        tl.store(column_sums + row_of_tiles * (tiles_n * WIDTH * PARTS) + columns, of_columns)


@device_function
def halves(x):
    """Return the left and the right half of the columns."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))


@device_function
def finish(
    x,
    place,
    sizes,
    factors,
    out,
    c,
    bias,
    aux,
    column_sums,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    OUT_LAYOUT: tl.constexpr,
    C_LAYOUT: tl.constexpr,
    AUX_LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """Write the result of a tile's sums x, part after part: registers hold one's c and aux.

    Args:
        x: sums of the parts FIRST, ..., FIRST + COUNT - 1 of the tile, which has PARTS.
        place: of the tile: batch, row of tiles, column of tiles.
        sizes: m, n, rows of tiles, columns of tiles.
        factors: alpha and beta.
        out: data, batch and row stride.
        c, aux: data, batch, row and column stride. aux is written, if not DERIVATIVE.
        bias: one number for each column.
        column_sums: of each row of tiles, or None.
    """
    if COUNT == 1:
        _finish_part(
            x, place, sizes, factors, out, c, bias, aux, column_sums,
            FIRST, PARTS, OUT_LAYOUT, C_LAYOUT, AUX_LAYOUT, ACTIVATION, DERIVATIVE,
        )  # fmt: skip
    else:
        left, right = halves(x)
        HALF: tl.constexpr = COUNT // 2
        finish(
            left, place, sizes, factors, out, c, bias, aux, column_sums,
            FIRST, HALF, PARTS, OUT_LAYOUT, C_LAYOUT, AUX_LAYOUT, ACTIVATION, DERIVATIVE,
        )  # fmt: skip
        finish(
            right, place, sizes, factors, out, c, bias, aux, column_sums,
            FIRST + HALF, HALF, PARTS, OUT_LAYOUT, C_LAYOUT, AUX_LAYOUT, ACTIVATION, DERIVATIVE,
        )  # fmt: skip
