"""Walk a list of tensors in one launch: a persistent grid over the list's chunks.

Each program owns a contiguous share of the chunks, and of each tensor a segment. A segment is
visited in blocks of ROWS rows. A row is 16 aligned bytes; less than 16 bytes at either end of a
segment are visited as rows of one element. csrc/include/amp_ext/lists.h describes the table.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import driver

from amp_ext.triton_kernels.launch import INTERPRETED_MULTIPROCESSORS, Launcher, multiprocessors
from amp_ext.triton_kernels.numerics import INTERPRETED, device_function, number, pointer

PROGRAMS = 1024
"""The most programs of a launch."""

CHUNK = tl.constexpr(16384)
ROWS = tl.constexpr(1024)
ENTRY_WORDS = tl.constexpr(3)
"""8-byte words of a TensorRef: data, numel, and first_chunk with the dtype above it."""


class ListLauncher(Launcher):
    """A kernel over a list, launched with a fixed number of programs a multiprocessor.

    Args:
        programs: of each multiprocessor; there are registers for all of them.
    """

    def __init__(self, kernel: Any, programs: int = 4, **options: Any) -> None:
        super().__init__(kernel, num_warps=8, enable_fp_fusion=False, **options)
        self.programs = programs

    def __call__(self, table: int, size: int, chunks: int, *arguments: Any) -> None:
        """Launch the kernel over a table of `size` entries with `chunks` chunks."""
        if INTERPRETED.value:
            most = INTERPRETED_MULTIPROCESSORS
        else:
            most = self.programs * multiprocessors(driver.active.get_current_device())
        programs = max(1, min(chunks, most, PROGRAMS))
        super().__call__(programs, table, size, chunks, *arguments)


@device_function
def to_alignment(address, size: tl.constexpr):
    """Return the number of elements before the next multiple of 16."""
    return (-address & 15) // size


@device_function
def begin_of_share(chunks, program):
    """Return a program's first chunk. The shares of the first programs are one chunk longer."""
    programs = number(tl.num_programs(0))
    per_program = chunks // programs
    longer = chunks - per_program * programs
    return program * per_program + min(program, longer)


@device_function
def first_chunk_of(word):
    """Return the first chunk from an entry's last word."""
    return word & 0xFFFFFFFF


@device_function
def owner_of(table, words: tl.constexpr, size, chunk):
    """Return the last entry that begins at or before `chunk`.

    This entry owns the chunk: empty tensors come before the entry that shares their first chunk.
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
def walk(table, words: tl.constexpr, size, chunks, visit: tl.constexpr, state, arguments):
    """Return `state` after all of this program's segments.

    For each: state = visit(entry, begin, count, state, arguments), with a pointer to the tensor's
    entry, the segment's first element and its number of elements.
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
                state = visit(entry, begin, count, state, arguments)
            first += (numel + (CHUNK - 1)) // CHUNK
            chunk = first
            tensor += 1
    return state


@device_function
def walk_tensors(table, size, chunks, visit: tl.constexpr, state, arguments):
    """Return `state` after all of this program's blocks of a list of tensors.

    For each block: state = visit(at, mask, state, arguments), with pointers to rows and the mask of
    existing rows.
    """
    return walk(table, ENTRY_WORDS, size, chunks, _visit_tensor, state, (visit, arguments))


@device_function
def _visit_tensor(entry, begin, count, state, arguments):
    data = number(tl.load(entry))
    dtype = (number(tl.load(entry + 2)) >> 32) & 0xFF
    if dtype == 0:
        state = _visit_segment(data, tl.float32, begin, count, state, arguments)
    elif dtype == 1:
        state = _visit_segment(data, tl.float16, begin, count, state, arguments)
    elif dtype == 2:
        state = _visit_segment(data, tl.bfloat16, begin, count, state, arguments)
    else:
        state = _visit_segment(data, tl.float64, begin, count, state, arguments)
    return state


@device_function
def _visit_segment(data, dtype: tl.constexpr, begin, count, state, arguments):
    # Unaligned elements, or all of a short segment, are one block.
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
        state = arguments[0](at[:, None], rows < others, state, arguments[1])
    aligned = address + head * size
    for done in range(0, whole, ROWS):
        at = pointer(aligned + done * 16, dtype, True) + rows_of(rows, row)
        mask = rows < tl.cast(min(whole - done, ROWS), tl.int32)
        state = arguments[0](at, mask, state, arguments[1])
    return state


@device_function
def rows_of(rows, row: tl.constexpr):
    """Return the offsets of the elements of adjacent rows."""
    return rows[:, None] * row + tl.arange(0, row)[None, :]
