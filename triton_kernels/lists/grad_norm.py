"""grad_norm: the L2 norm of grads * inv_scale, and of each tensor; read-only, one launch.

Each program stores an fp64 sum of squares for its part of the list, or of each tensor. The last
program adds the sums in order. Every order depends on the list, its alignment and the device alone,
so that a result is bitwise the same in every run.
"""

import triton.language as tl

from amp_ext.triton_kernels.launch import is_last, kernel
from amp_ext.triton_kernels.lists.foreach import (
    ENTRY_WORDS,
    PROGRAMS,
    ROWS,
    ListLauncher,
    first_chunk_of,
    program_of,
    walk_tensors,
)
from amp_ext.triton_kernels.numerics import (
    device_function,
    is_any,
    is_finite,
    is_row_finite,
    largest,
    number,
    pointer,
    total,
    widen,
)

SUMS = tl.constexpr(PROGRAMS)
TENSORS = tl.constexpr(32)
LANES = tl.constexpr(8)


@kernel
def grad_norm_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    inv_scale: tl.int64,
    found_inf: tl.int64,
    norm: tl.int64,
    norms: tl.int64,
    partial_sums: tl.int64,
    ticket: tl.int64,
    PER_TENSOR: tl.constexpr,
):
    factor = tl.load(pointer(inv_scale, tl.float32), mask=inv_scale != 0, other=1.0)
    partial_sums = pointer(partial_sums, tl.float64)
    state = (tl.full((ROWS,), 0.0, tl.float64), tl.zeros((ROWS,), tl.int1))
    arguments = (factor, partial_sums)
    if PER_TENSOR:
        state = walk_tensors(table, size, chunks, _square, _leave, state, arguments)
    else:
        state = walk_tensors(table, size, chunks, _square, None, state, arguments)
        tl.store(partial_sums + tl.program_id(0), total(state[0], axis=0))
    tl.store(pointer(found_inf, tl.float32), 1.0, mask=is_any(state[1]))

    if is_last(pointer(ticket, tl.int32), tl.num_programs(0)):
        if PER_TENSOR:
            squares = _write_norms(table, size, chunks, partial_sums, norms)
        else:
            i = tl.arange(0, SUMS)
            mask = i < tl.num_programs(0)
            sums = tl.load(partial_sums + i, mask=mask, other=0.0, cache_modifier=".cg")
            squares = total(sums, axis=0)
        root = tl.sqrt(squares).to(tl.float32)
        tl.store(pointer(norm, tl.float32), root)
        tl.store(pointer(found_inf, tl.float32), 1.0, mask=is_finite(root) == 0)


# ptxas would spill registers for a fourth program.
grad_norm = ListLauncher(grad_norm_kernel, programs=3, maxnreg=80)


@device_function
def _square(at, mask, state, arguments):
    sums, bad = state
    wide = widen(tl.load(at, mask=mask[:, None], other=0))
    product = wide * arguments[0].to(wide.dtype)
    exact = product.to(tl.float64)
    sums += tl.where(mask, total(exact * exact, axis=1), 0.0)
    return sums, bad | (mask & ~is_row_finite(product))


@device_function
def _leave(tensor, state, arguments):
    # In order, the pairs (program, tensor) with a sum grow in at least one number: each has a slot
    # of its own.
    sums, bad = state
    tl.store(arguments[1] + (tensor + tl.program_id(0)), total(sums, axis=0))
    return tl.full((ROWS,), 0.0, tl.float64), bad


@device_function
def _write_norms(table, size, chunks, partial_sums, norms):
    # Returns the sum of all tensors' squares.
    table = pointer(table, tl.int64)
    norms = pointer(norms, tl.float32)
    size = number(size)
    chunks = number(chunks)
    lanes = tl.arange(0, LANES)
    squares = tl.zeros((TENSORS,), tl.float64)
    for done in range(0, size, TENSORS):
        tensor = done + tl.arange(0, TENSORS)
        last_word = table + (tensor * ENTRY_WORDS + (ENTRY_WORDS - 1))
        begin = first_chunk_of(tl.load(last_word, mask=tensor < size, other=0))
        next_word = tl.load(last_word + ENTRY_WORDS, mask=tensor + 1 < size, other=0)
        end = tl.where(tensor + 1 < size, first_chunk_of(next_word), chunks)
        first = program_of(chunks, begin)
        after = program_of(chunks, end - 1) + 1
        after = tl.where((tensor < size) & (begin < end), after, first)
        sums = tl.zeros((TENSORS,), tl.float64)
        for begun in range(0, number(largest(after - first, axis=0)), LANES):
            program = first[:, None] + (begun + lanes)[None, :]
            parts = tl.load(
                partial_sums + (program + tensor[:, None]),
                mask=program < after[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            sums += total(parts, axis=1)
        tl.store(norms + tensor, tl.sqrt(sums).to(tl.float32), mask=tensor < size)
        squares += sums
    return total(squares, axis=0)
