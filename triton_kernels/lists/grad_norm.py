"""grad_norm: the L2 norm of grads * inv_scale, also tensor by tensor, and the finiteness check:
read-only on the gradients, one launch.

Each program leaves an fp64 sum of squares for the part of a tensor, or of the list, that it has
read; the program that draws the last ticket adds them up in order. What is added to what depends
on the list, on how its segments are aligned and on the device alone: with these the same, the
result is bitwise the same in every run.
"""

import triton.language as tl
from amp_ext.triton_kernels.launch import Launcher
from amp_ext.triton_kernels.lists import foreach
from amp_ext.triton_kernels.lists.foreach import (
    ENTRY_WORDS,
    PROGRAMS,
    ROWS,
    first_chunk_of,
    number,
    pointer,
    program_of,
    walk_tensors,
)
from amp_ext.triton_kernels.numerics import (
    any_row,
    device_function,
    is_finite,
    largest,
    load_rows,
    rows_finite,
    sum_rows,
    total,
    widen,
)

PROGRAMS_PER_MULTIPROCESSOR = 3
# The registers that leaves each of them; ptxas spills some to have four.
OPTIONS = {**foreach.OPTIONS, "maxnreg": 80}
SUMS = tl.constexpr(PROGRAMS)
TENSORS = tl.constexpr(32)
LANES = tl.constexpr(8)


def grad_norm(
    table: int,
    size: int,
    chunks: int,
    inv_scale: int,
    found_inf: int,
    norm: int,
    norms: int,
    partial_sums: int,
    ticket: int,
) -> None:
    _launch(
        foreach.programs(chunks, PROGRAMS_PER_MULTIPROCESSOR),
        *(table, size, chunks, inv_scale, found_inf, norm, norms, partial_sums, ticket),
        norms != 0,
    )


@foreach.kernel
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
    tl.store(pointer(found_inf, tl.float32), 1.0, mask=any_row(state[1]))

    tl.debug_barrier()  # what every thread has written comes before the ticket
    drawn = tl.atomic_add(pointer(ticket, tl.int32), 1, sem="acq_rel", scope="gpu")
    if drawn == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(pointer(ticket, tl.int32), 0)  # for the next launch
        if PER_TENSOR:
            squares = _write_norms(table, size, chunks, partial_sums, norms)
        else:
            i = tl.arange(0, SUMS)
            sums = partial_sums + i
            mask = i < tl.num_programs(0)
            squares = total(tl.load(sums, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
        root = tl.sqrt(squares).to(tl.float32)
        tl.store(pointer(norm, tl.float32), root)
        tl.store(pointer(found_inf, tl.float32), 1.0, mask=is_finite(root) == 0)


_launch = Launcher(grad_norm_kernel, OPTIONS)


@device_function
def _square(tensor, at, mask, state, arguments):
    sums, bad = state
    wide = widen(load_rows(at, mask))
    product = wide * arguments[0].to(wide.dtype)
    exact = product.to(tl.float64)
    sums += tl.where(mask, sum_rows(exact * exact), 0.0)
    return sums, bad | (mask & ~rows_finite(product))


@device_function
def _leave(tensor, state, arguments):
    # The pairs (program, tensor) that have a sum, in order, grow in one number or in both, so
    # program + tensor is a slot of its own for each.
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
