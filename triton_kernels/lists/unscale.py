"""unscale_: grads *= inv_scale in place, clipped to a norm that is given, and found_inf = 1 if a
rounded product is not finite. One launch.
"""

import triton.language as tl
from amp_ext.triton_kernels.launch import Launcher
from amp_ext.triton_kernels.lists import foreach
from amp_ext.triton_kernels.lists.foreach import ROWS, pointer, walk_tensors
from amp_ext.triton_kernels.numerics import (
    any_row,
    device_function,
    is_finite,
    load_rows,
    round_to,
    rows_finite,
    store_rows,
    widen,
)


def unscale_(
    table: int, size: int, chunks: int, inv_scale: int, found_inf: int, norm: int, max_norm: float
) -> None:
    if chunks or norm:
        programs = foreach.programs(chunks)
        _launch(programs, table, size, chunks, inv_scale, found_inf, norm, max_norm)


@foreach.kernel
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
    # Every program decides by what no program writes: found_inf may change under way.
    clips = norm != 0
    norm = tl.load(pointer(norm, tl.float32), mask=clips, other=0.0)
    coefficient = tl.where(clips, clip_coefficient(norm, max_norm), 1.0)
    writes = (inv_scale != 1.0) | (coefficient != 1.0)
    finite = is_finite(norm)
    if finite & (writes | (clips == 0)):
        bad = tl.zeros((ROWS,), tl.int1)
        factors = (inv_scale, coefficient, writes)
        bad = walk_tensors(table, size, chunks, _scale, None, bad, factors)
        tl.store(found_inf, 1.0, mask=any_row(bad))
    else:
        tl.store(found_inf, 1.0, mask=finite == 0)


_launch = Launcher(unscale_kernel, foreach.OPTIONS)


@device_function
def clip_coefficient(norm, max_norm):
    """Return min(1, max_norm / (norm + 1e-6)) as csrc/include/amp_ext/scale.h does."""
    coefficient = tl.div_rn(1.0, norm + 1e-6) * max_norm
    return tl.where(coefficient < 1.0, coefficient, 1.0)


@device_function
def _scale(tensor, at, mask, bad, factors):
    inv_scale, coefficient, writes = factors
    x = load_rows(at, mask)
    wide = widen(x)
    wide = wide * inv_scale.to(wide.dtype) * coefficient.to(wide.dtype)
    product = round_to(wide, x.dtype)
    if writes:
        store_rows(at, product, mask)
    return bad | (mask & ~rows_finite(product))
