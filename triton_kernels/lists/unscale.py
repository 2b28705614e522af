"""unscale_: grads *= inv_scale in place, clipped; found_inf = 1 on overflow. One launch."""

import triton.language as tl

from amp_ext.triton_kernels.launch import kernel
from amp_ext.triton_kernels.lists.foreach import ROWS, ListLauncher, walk_tensors
from amp_ext.triton_kernels.numerics import (
    device_function,
    is_any,
    is_finite,
    is_row_finite,
    pointer,
    round_to,
    widen,
)


@kernel
def unscale_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    inv_scale: tl.int64,
    found_inf: tl.int64,
    norm: tl.int64,
    max_norm: tl.float32,
):
    found_inf = pointer(found_inf, tl.float32)
    inv_scale = tl.load(pointer(inv_scale, tl.float32))
    # Every program decides by values that no program writes: found_inf may change meanwhile.
    clips = norm != 0
    norm = tl.load(pointer(norm, tl.float32), mask=clips, other=0.0)
    coefficient = tl.where(clips, clip_coefficient(norm, max_norm), 1.0)
    writes = (inv_scale != 1.0) | (coefficient != 1.0)
    finite = is_finite(norm)
    if finite & (writes | (clips == 0)):
        bad = tl.zeros((ROWS,), tl.int1)
        factors = (inv_scale, coefficient, writes)
        bad = walk_tensors(table, size, chunks, _scale, bad, factors)
        tl.store(found_inf, 1.0, mask=is_any(bad))
    else:
        tl.store(found_inf, 1.0, mask=finite == 0)


unscale_ = ListLauncher(unscale_kernel)


@device_function
def clip_coefficient(norm, max_norm):
    """Return min(1, max_norm / (norm + 1e-6)) as csrc/include/amp_ext/scale.h does."""
    coefficient = tl.div_rn(1.0, norm + 1e-6) * max_norm
    return tl.where(coefficient < 1.0, coefficient, 1.0)


@device_function
def _scale(at, mask, bad, factors):
    inv_scale, coefficient, writes = factors
    x = tl.load(at, mask=mask[:, None], other=0)
    wide = widen(x)
    wide = wide * inv_scale.to(wide.dtype) * coefficient.to(wide.dtype)
    product = round_to(wide, x.dtype)
    if writes:
        tl.store(at, product, mask=mask[:, None])
    return bad | (mask & ~is_row_finite(product))
