"""grad_norm: the L2 norm of grads * inv_scale; read-only, one launch.

Each program stores an fp64 sum of squares for its part of the list. The last program adds the sums
in order. Every order depends on the list, its alignment and the device alone, so that a result is
bitwise the same in every run.
"""

import triton.language as tl

from amp_ext.triton_kernels.launch import is_last, kernel
from amp_ext.triton_kernels.lists.foreach import PROGRAMS, ROWS, ListLauncher, walk_tensors
from amp_ext.triton_kernels.numerics import device_function, is_finite, pointer, total, widen

SUMS = tl.constexpr(PROGRAMS)


@kernel
def grad_norm_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    inv_scale: tl.int64,
    found_inf: tl.int64,
    norm: tl.int64,
    partial_sums: tl.int64,
    ticket: tl.int64,
):
    factor = tl.load(pointer(inv_scale, tl.float32), mask=inv_scale != 0, other=1.0)
    partial_sums = pointer(partial_sums, tl.float64)
    sums = tl.full((ROWS,), 0.0, tl.float64)
    sums = walk_tensors(table, size, chunks, _square, sums, factor)
    tl.store(partial_sums + tl.program_id(0), total(sums, axis=0))

    if is_last(pointer(ticket, tl.int32), tl.num_programs(0)):
        i = tl.arange(0, SUMS)
        mask = i < tl.num_programs(0)
        parts = tl.load(partial_sums + i, mask=mask, other=0.0, cache_modifier=".cg")
        root = tl.sqrt(total(parts, axis=0)).to(tl.float32)
        tl.store(pointer(norm, tl.float32), root)  # not finite if a product is not
        tl.store(pointer(found_inf, tl.float32), 1.0, mask=is_finite(root) == 0)


# ptxas would spill registers for a fourth program.
grad_norm = ListLauncher(grad_norm_kernel, programs=3, maxnreg=80)


@device_function
def _square(at, mask, sums, factor):
    wide = widen(tl.load(at, mask=mask[:, None], other=0))
    product = wide * factor.to(wide.dtype)
    exact = product.to(tl.float64)
    return sums + tl.where(mask, total(exact * exact, axis=1), 0.0)
