"""cast_: outputs = inputs, rounded to nearest even into the outputs' dtypes. One launch."""

import triton.language as tl

from amp_ext.triton_kernels.launch import kernel
from amp_ext.triton_kernels.lists.foreach import ROWS, ListLauncher, rows_of, to_alignment, walk
from amp_ext.triton_kernels.numerics import device_function, number, pointer, round_to

ENTRY_WORDS = tl.constexpr(4)
"""8-byte words of a CastRef: output, input, numel, and first_chunk with the dtypes above it."""
BLOCK_BYTES = tl.constexpr(16384)
"""The bytes of a block's wider side."""


@kernel
def cast_kernel(table: tl.int64, size: tl.int64, chunks: tl.int64):
    walk(table, ENTRY_WORDS, size, chunks, _cast_entry, (), ())


# ptxas would spill registers for a fourth program on sm_80.
cast_ = ListLauncher(cast_kernel, programs=3)


@device_function
def _cast_entry(entry, begin, count, state, arguments):
    output = number(tl.load(entry))
    source = number(tl.load(entry + 1))
    dtypes = number(tl.load(entry + 3)) >> 32
    if dtypes & 0xFF == 0:
        _cast_to(tl.float32, output, source, (dtypes >> 8) & 0xFF, begin, count)
    elif dtypes & 0xFF == 1:
        _cast_to(tl.float16, output, source, (dtypes >> 8) & 0xFF, begin, count)
    elif dtypes & 0xFF == 2:
        _cast_to(tl.bfloat16, output, source, (dtypes >> 8) & 0xFF, begin, count)
    else:
        _cast_to(tl.float64, output, source, (dtypes >> 8) & 0xFF, begin, count)
    return state


@device_function
def _cast_to(to: tl.constexpr, output, source, dtype, begin, count):
    if dtype == 0:
        _cast(to, tl.float32, output, source, begin, count)
    elif dtype == 1:
        _cast(to, tl.float16, output, source, begin, count)
    elif dtype == 2:
        _cast(to, tl.bfloat16, output, source, begin, count)
    else:
        _cast(to, tl.float64, output, source, begin, count)


@device_function
def _cast(to: tl.constexpr, dtype: tl.constexpr, output, source, begin, count):
    # A row is the fewest elements that are whole 16-byte accesses on both sides. All elements come
    # before the first row where there are few, or the two sides are never aligned together.
    to_size: tl.constexpr = to.primitive_bitwidth // 8
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    row: tl.constexpr = 16 // min(to_size, size)
    block: tl.constexpr = BLOCK_BYTES // max(to_size, size) // row
    output += begin * to_size
    source += begin * size
    head = to_alignment(output, to_size) if to_size < size else to_alignment(source, size)
    apart = (output + head * to_size) | (source + head * size)
    head = count if (apart & 15 != 0) | (count <= ROWS) else head
    whole = (count - head) // row
    others = count - whole * row

    for done in range(0, others, ROWS):
        i = done + tl.arange(0, ROWS)
        mask = i < others
        if whole > 0:
            i += tl.where(i < head, 0, whole * row)
        x = tl.load(pointer(source, dtype) + i, mask=mask, other=0)
        tl.store(pointer(output, to) + i, round_to(x, to), mask=mask)

    output += head * to_size
    source += head * size
    rows = tl.arange(0, block)
    for done in range(0, whole, block):
        i = done * row + rows_of(rows, row)
        mask = (rows < whole - done)[:, None]
        x = tl.load(pointer(source, dtype, True) + i, mask=mask, other=0)
        tl.store(pointer(output, to, True) + i, round_to(x, to), mask=mask)
