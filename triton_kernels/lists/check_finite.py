"""check_finite: found_inf = 1 if an element is not finite. Read-only, one launch."""

import triton.language as tl
from amp_ext.triton_kernels.launch import Launcher
from amp_ext.triton_kernels.lists import foreach
from amp_ext.triton_kernels.lists.foreach import ROWS, pointer, walk_tensors
from amp_ext.triton_kernels.numerics import any_row, device_function, load_rows, rows_finite


def check_finite(table: int, size: int, chunks: int, found_inf: int) -> None:
    if chunks:
        _launch(foreach.programs(chunks), table, size, chunks, found_inf)


@foreach.kernel
def check_finite_kernel(table: tl.int64, size: tl.int64, chunks: tl.int64, found_inf: tl.int64):
    bad = walk_tensors(table, size, chunks, _look, None, tl.zeros((ROWS,), tl.int1), None)
    tl.store(pointer(found_inf, tl.float32), 1.0, mask=any_row(bad))


_launch = Launcher(check_finite_kernel, foreach.OPTIONS)


@device_function
def _look(tensor, at, mask, bad, nothing):
    return bad | (mask & ~rows_finite(load_rows(at, mask)))
