"""update_scale_: the next loss scale from every found_inf, in one launch of one warp."""

import triton.language as tl

from amp_ext.triton_kernels.launch import Launcher, kernel
from amp_ext.triton_kernels.numerics import device_function, double, is_any, is_finite, pointer

BLOCK = tl.constexpr(128)


@kernel
def update_scale_kernel(
    found_infs: tl.int64,  # the address of the only float, or of `count` addresses
    count: tl.int64,
    scale: tl.int64,
    growth_tracker: tl.int64,
    hysteresis_tracker: tl.int64,
    skipped_steps: tl.int64,
    next_step: tl.int64,
    growth_factor: tl.int64,  # the bits of a double, as backoff_factor
    backoff_factor: tl.int64,
    growth_interval: tl.int64,
    hysteresis: tl.int64,
    min_scale: tl.float32,
    max_scale: tl.float32,
):
    only = tl.cast(found_infs, tl.int64)
    addresses = pointer(found_infs, tl.int64)
    listed = tl.where(count == 1, 0, count)
    overflow = tl.zeros((BLOCK,), tl.int1)
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        address = tl.load(addresses + i, mask=i < listed, other=only)
        overflow |= tl.load(pointer(address, tl.float32), mask=i < count, other=0.0) != 0.0
    overflow = is_any(overflow)

    # The steps of close_step in csrc/include/amp_ext/scale.h.
    tolerates = hysteresis_tracker != 0
    counts = skipped_steps != 0
    prepares = next_step != 0
    scale = pointer(scale, tl.float32)
    growth_tracker = pointer(growth_tracker, tl.int32)
    hysteresis_tracker = pointer(hysteresis_tracker, tl.int32)
    skipped_steps = pointer(skipped_steps, tl.int64)
    next_step = pointer(next_step, tl.float32)

    old = tl.load(scale)
    steps = tl.load(growth_tracker).to(tl.int64) + 1
    left = tl.load(hysteresis_tracker, mask=tolerates, other=0) - 1
    skipped = tl.load(skipped_steps, mask=counts, other=0) + 1
    found_inf = tl.load(next_step + 1, mask=prepares, other=0.0)
    tl.debug_barrier()  # one thread overwrites values that all have read

    grows = (overflow == 0) & (steps >= growth_interval)
    backs_off = overflow & ((hysteresis <= 1) | (left <= 0))
    new = tl.where(
        overflow,
        backed_off(old, double(backoff_factor), min_scale),
        grown(old, double(growth_factor), max_scale),
    )
    steps = tl.where(overflow | grows, 0, steps).to(tl.int32)
    left = tl.where(overflow, left, tl.cast(hysteresis, tl.int32))
    tl.store(scale, new, mask=grows | backs_off)
    tl.store(growth_tracker, steps)
    tl.store(hysteresis_tracker, left, mask=tolerates & ((hysteresis > 1) | (overflow == 0)))
    tl.store(skipped_steps, skipped, mask=counts & overflow)

    new = tl.where(grows | backs_off, new, old)
    tl.store(next_step, tl.div_rn(1.0, new), mask=prepares)
    tl.store(next_step + 1, 0.0, mask=prepares)
    tl.store(next_step + 2, found_inf, mask=prepares)


update_scale_ = Launcher(update_scale_kernel, num_warps=1, enable_fp_fusion=False)


@device_function
def backed_off(scale, factor, floor):
    """Return scale * factor, stopped by the floor; a scale below the floor stays."""
    new = (scale.to(tl.float64) * factor).to(tl.float32)
    lowest = tl.where(scale < floor, scale, floor)
    return tl.where(new < lowest, lowest, new)


@device_function
def grown(scale, factor, ceiling):
    """Return scale * factor, at most the ceiling or the scale; the scale if not finite."""
    new = (scale.to(tl.float64) * factor).to(tl.float32)
    highest = tl.where(scale > ceiling, scale, ceiling)
    return tl.where(is_finite(new), tl.where(new > highest, highest, new), scale)
