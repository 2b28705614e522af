"""The walk of a tensor list by one launch: a persistent grid over the list's chunks.

Each program owns a contiguous share of the chunks. What it owns of a tensor is a segment, of which
all but less than 16 bytes at either end is aligned and moves 16 bytes at a time: in blocks of
ROWS rows, a row being 16 bytes of elements.

What a launch is given is described in csrc/include/amp_ext/lists.h.
Kernels take addresses as numbers, so that no address compiles a kernel anew.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from amp_ext.triton_kernels.numerics import INTERPRETED, device_function, rows_of

PROGRAMS = 1024
"""The most programs of a launch."""
PROGRAMS_PER_MULTIPROCESSOR = 4
INTERPRETED_PROGRAMS = 3

CHUNK = tl.constexpr(16384)
ROWS = tl.constexpr(1024)
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

ENTRY_WORDS = tl.constexpr(3)
"""8-byte words of a ChunkEntry: data, numel, and first_chunk with the dtype above it."""


def kernel(function):
    """Make a kernel that is compiled once, whatever the numbers that it is called with."""
    kinds = function.__annotations__.items()
    numbers = [name for name, kind in kinds if "constexpr" not in str(kind)]
    if INTERPRETED.value:
        # It replaces the functions of the modules that a kernel's own module names.
        function.__globals__["core"] = tl.core
    return triton.jit(function, do_not_specialize=numbers)


def programs(chunks: int, per_multiprocessor: int = PROGRAMS_PER_MULTIPROCESSOR) -> int:
    """Return how many programs share the chunks: by the list and the device alone.

    `per_multiprocessor` is how many of the kernel's there are registers for.
    """
    if INTERPRETED.value:
        most = INTERPRETED_PROGRAMS
    else:
        most = per_multiprocessor * _multiprocessors(torch.cuda.current_device())
    return max(1, min(chunks, most, PROGRAMS))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@device_function
def number(x):
    """Return an integer as int64. The interpreter computes sooner with Python's own."""
    if INTERPRETED:
        return int(x)
    else:
        return x.to(tl.int64)


@device_function
def pointer(address, dtype: tl.constexpr):
    """Return the address of elements of a dtype as a pointer."""
    return tl.cast(tl.cast(address, tl.int64), tl.pointer_type(dtype))


@device_function
def aligned_pointer(address, dtype: tl.constexpr):
    """Return the same of an address that is a multiple of 16."""
    return tl.multiple_of(tl.cast(tl.cast(address, tl.int64), tl.pointer_type(dtype)), 16)


@device_function
def to_alignment(address, size: tl.constexpr):
    """Return how many elements of `size` bytes lie before the next multiple of 16."""
    return (-address & 15) // size


@device_function
def begin_of_share(chunks, program):
    """Return a program's first chunk. The shares of the first programs are one chunk longer."""
    programs = number(tl.num_programs(0))
    per_program = chunks // programs
    longer = chunks - per_program * programs
    return program * per_program + min(program, longer)


@device_function
def program_of(chunks, chunk):
    """Return which program has a chunk in its share."""
    programs = number(tl.num_programs(0))
    per_program = chunks // programs
    longer = chunks - per_program * programs
    of_longer = longer * (per_program + 1)
    after = longer + (chunk - of_longer) // max(per_program, 1)
    return tl.where(chunk < of_longer, chunk // (per_program + 1), after)


@device_function
def first_chunk_of(word):
    """Return the first chunk that is in the last word of an entry."""
    return word & 0xFFFFFFFF


@device_function
def owner_of(table, words: tl.constexpr, size, chunk):
    """Return the last entry that begins at or before `chunk`.

    It owns the chunk: empty tensors come before the entry they share a first chunk with.
    """
    low = size - size
    high = size
    while high - low > 1:
        middle = (low + high) // 2
        if first_chunk_of(tl.load(table + (middle * words + words - 1))) <= chunk:
            low = middle
        else:
            high = middle
    return low


@device_function
def walk(
    table,
    words: tl.constexpr,
    size,
    chunks,
    visit_segment: tl.constexpr,
    visit: tl.constexpr,
    leave: tl.constexpr,
    state,
    arguments,
):
    """Return `state` after all of this program's segments.

    For each state = visit_segment(visit, leave, tensor, entry, begin, count, state, arguments): a
    pointer to the tensor's entry, the segment's first element and how many it has.
    """
    table = pointer(table, tl.int64)
    chunks = number(chunks)
    program = number(tl.program_id(0))
    chunk = begin_of_share(chunks, program)
    end = begin_of_share(chunks, program + 1)
    if chunk < end:
        tensor = owner_of(table, words, number(size), chunk)
        first = first_chunk_of(number(tl.load(table + (tensor * words + words - 1))))
        while chunk < end:
            entry = table + tensor * words
            numel = number(tl.load(entry + (words - 2)))
            begin = (chunk - first) * CHUNK
            count = min(numel, (end - first) * CHUNK) - begin
            if count > 0:
                state = visit_segment(visit, leave, tensor, entry, begin, count, state, arguments)
            first += (numel + (CHUNK - 1)) // CHUNK
            chunk = first
            tensor += 1
    return state


@device_function
def walk_tensors(table, size, chunks, visit: tl.constexpr, leave: tl.constexpr, state, arguments):
    """Return `state` after all of this program's part of a list of tensors.

    For blocks of a segment state = visit(tensor, at, mask, state, arguments): pointers, of ROWS
    elements or rows, and which rows are there; after each segment state = leave(tensor, state,
    arguments), unless that is None.
    """
    return walk(table, ENTRY_WORDS, size, chunks, _dispatch, visit, leave, state, arguments)


@device_function
def _dispatch(
    visit: tl.constexpr, leave: tl.constexpr, tensor, entry, begin, count, state, arguments
):
    data = number(tl.load(entry))
    dtype = (number(tl.load(entry + 2)) >> 32) & 0xFF
    if dtype == 0:
        state = _segment(visit, tensor, data, tl.float32, begin, count, state, arguments)
    elif dtype == 1:
        state = _segment(visit, tensor, data, tl.float16, begin, count, state, arguments)
    elif dtype == 2:
        state = _segment(visit, tensor, data, tl.bfloat16, begin, count, state, arguments)
    else:
        state = _segment(visit, tensor, data, tl.float64, begin, count, state, arguments)
    if leave is not None:
        state = leave(tensor, state, arguments)
    return state


@device_function
def _segment(
    visit: tl.constexpr, tensor, data, dtype: tl.constexpr, begin, count, state, arguments
):
    # What is not aligned, or all of a short segment, is visited in one block of elements.
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    row: tl.constexpr = 16 // size
    rows = tl.arange(0, ROWS)
    address = data + begin * size
    head = count if count <= ROWS else to_alignment(address, size)
    whole = (count - head) // row
    others = count - whole * row
    if others > 0:
        at = pointer(address, dtype) + rows
        if whole > 0:
            at += tl.where(rows < head, 0, whole * row)
        state = visit(tensor, at, rows < others, state, arguments)
    aligned = address + head * size
    for done in range(0, whole, ROWS):
        at = aligned_pointer(aligned + done * 16, dtype) + rows_of(rows, row)
        mask = rows < tl.cast(min(whole - done, ROWS), tl.int32)
        state = visit(tensor, at, mask, state, arguments)
    return state
