"""check_finite: found_inf = 1 if an element is not finite, and the index of a tensor that holds
one. Read-only, one launch.
"""

import triton.language as tl
from amp_ext.triton_kernels import foreach
from amp_ext.triton_kernels.foreach import ROWS, pointer, walk_tensors
from amp_ext.triton_kernels.numerics import device_function, least, load_rows, rows_finite

NONE = tl.constexpr(0x7FFFFFFF)


def check_finite(table: int, size: int, chunks: int, found_inf: int, bad_tensor: int) -> None:
    if chunks:
        grid = (foreach.programs(chunks),)
        check_finite_kernel[grid](table, size, chunks, found_inf, bad_tensor, **foreach.OPTIONS)


@foreach.kernel
def check_finite_kernel(
    table: tl.int64, size: tl.int64, chunks: tl.int64, found_inf: tl.int64, bad_tensor: tl.int64
):
    bad = tl.full((ROWS,), NONE, tl.int32)
    bad = least(walk_tensors(table, size, chunks, _look, None, bad, None), axis=0)
    tl.store(pointer(found_inf, tl.float32), 1.0, mask=bad != NONE)
    given = bad_tensor != 0
    tl.store(pointer(bad_tensor, tl.int64), bad.to(tl.int64), mask=given & (bad != NONE))


@device_function
def _look(tensor, at, mask, bad, nothing):
    # Of each row the first tensor with something bad in it.
    fine = rows_finite(load_rows(at, mask))
    return tl.minimum(bad, tl.where(mask & ~fine, tl.cast(tensor, tl.int32), NONE))
