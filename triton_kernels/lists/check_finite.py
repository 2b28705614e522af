"""check_finite: found_inf = 1 if an element is not finite. Read-only, one launch."""

import triton.language as tl

from amp_ext.triton_kernels.launch import kernel
from amp_ext.triton_kernels.lists.foreach import ROWS, ListLauncher, walk_tensors
from amp_ext.triton_kernels.numerics import device_function, is_any, is_row_finite, pointer


@kernel
def check_finite_kernel(table: tl.int64, size: tl.int64, chunks: tl.int64, found_inf: tl.int64):
    bad = walk_tensors(table, size, chunks, _check, tl.zeros((ROWS,), tl.int1), None)
    tl.store(pointer(found_inf, tl.float32), 1.0, mask=is_any(bad))


check_finite = ListLauncher(check_finite_kernel)


@device_function
def _check(at, mask, bad, nothing):
    return bad | ~is_row_finite(tl.load(at, mask=mask[:, None], other=0))
