"""Share parts between the updates of all optimizers.

The arithmetic equals csrc/include/amp_ext/optim.h, to the bit.
"""

from __future__ import annotations

import triton.language as tl

from amp_ext.triton_kernels.launch import is_last
from amp_ext.triton_kernels.lists.foreach import CHUNK, rows_of
from amp_ext.triton_kernels.lists.unscale import clip_coefficient
from amp_ext.triton_kernels.numerics import (
    INTERPRETED,
    bits,
    device_function,
    double,
    is_finite,
    number,
    pointer,
    round_to,
    widen,
)

ENTRY_WORDS = tl.constexpr(10)
"""8-byte words of an UpdateRef: seven addresses, dtypes, numel, first_chunk with place above."""
STEP_WORD = tl.constexpr(6)
DTYPES_WORD = tl.constexpr(7)
ROW = tl.constexpr(4)
"""Elements of 16 bytes of fp32."""
ROWS = tl.constexpr(4096 if INTERPRETED.value else 256)
"""Rows of a block: a thread has registers for one row of each tensor."""
TENSORS = tl.constexpr(256)


@device_function
def runs(found_inf, norm):
    """Return whether to update. Sets found_inf where the norm is not finite."""
    there = norm != 0
    finite = is_finite(tl.load(pointer(norm, tl.float32), mask=there, other=0.0))
    flag = pointer(found_inf, tl.float32)
    # found_inf is read only where no program writes it.
    found = tl.load(flag, mask=finite & (found_inf != 0), other=0.0)
    first = tl.program_id(0) == 0
    tl.store(flag, 1.0, mask=(finite == 0) & (found_inf != 0) & first)
    return finite & (found == 0.0)


@device_function
def step_factors(lr, tensor_lr, inv_scale, norm, max_norm, maximize):
    """Return the fp64 learning rate and the two factors of gradients, in their order."""
    replaced = tl.load(pointer(tensor_lr, tl.float32), mask=tensor_lr != 0, other=0.0)
    lr = tl.where(tensor_lr != 0, replaced.to(tl.float64), double(lr))
    inv_scale = tl.load(pointer(inv_scale, tl.float32), mask=inv_scale != 0, other=1.0)
    size = tl.load(pointer(norm, tl.float32), mask=norm != 0, other=0.0)
    coefficient = tl.where(norm != 0, clip_coefficient(size, max_norm), 1.0)
    return lr, inv_scale, tl.where(maximize != 0, -coefficient, coefficient)


@device_function
def update_number(step):
    """Return the number, from 1 on, of the update that follows `step` updates."""
    few = step < 1073741824.0
    done = tl.where(few & (step > 0.0), step, 0.0).to(tl.int64)
    return tl.where(few | (step != step), done, 1073741824) + 1


@device_function
def power(base, exponent):
    """Return base**exponent by repeated squaring."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@device_function
def _times(x, y):
    return tl.mul(x, tl.cast(y, tl.uint32), sanitize_overflow=False)


@device_function
def _plus(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@device_function
def mixed(x):
    """Return the last step of MurmurHash3."""
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


@device_function
def noise_seed(update, entry):
    """Return the seed of the noise of an entry's parameter in one update."""
    place = number(tl.load(entry + (ENTRY_WORDS - 1))) >> 32
    return mixed(_plus(mixed(tl.cast(update, tl.uint32)), tl.cast(place, tl.uint32)))


@device_function
def noise(seed, element, pair: tl.constexpr):
    """Return the random bits of elements, by their indices in the tensor."""
    chunk = (element // CHUNK).to(tl.uint32)
    place = _times((element % CHUNK).to(tl.uint32) * 2 + pair, 0x9E3779B9)
    return mixed(_plus(mixed(_plus(seed, chunk)), place))


@device_function
def stochastic_bf16(x, random_bits):
    """Return the bits of x, rounded to bf16 up or down by 16 random bits."""
    pattern = bits(x).to(tl.uint32, bitcast=True)
    raised = tl.where(is_finite(x), _plus(pattern, random_bits), pattern)
    raised = tl.where(x != x, 0x7FC00000, raised)
    return (raised >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@device_function
def where_also(mask, condition):
    """Return the mask if a scalar condition holds, else none. The interpreter needs the cast."""
    return mask & tl.cast(condition, tl.int1)


@device_function
def tensor_at(entry, place: tl.constexpr, dtype, begin):
    """Return a tensor as its address from element `begin` on, or 0, and its dtype."""
    address = number(tl.load(entry + place))
    size = 4 - 2 * number(dtype != 0)
    return address + begin * size * number(address != 0), dtype


@device_function
def load_float(tensor, i, mask, PLAIN: tl.constexpr, ALIGNED: tl.constexpr):
    """Load elements `i` of a tensor as fp32, 0 where it is absent. PLAIN tensors are fp32.

    Other tensors are loaded in both widths, with masks. A load without active lanes moves nothing,
    and no load waits for another as it would in branches.
    """
    address, dtype = tensor
    mask = where_also(mask, address != 0)
    at = pointer(address, tl.float32, ALIGNED) + i
    if PLAIN:
        return tl.load(at, mask=mask, other=0)
    else:
        single = tl.load(at, mask=where_also(mask, dtype == 0), other=0)
        half_at = pointer(address, tl.int16, ALIGNED) + i
        half = tl.load(half_at, mask=where_also(mask, dtype != 0), other=0)
        return tl.where(dtype == 0, single, _widened(half, dtype))


@device_function
def _widened(half, dtype):
    f16 = widen(half.to(tl.float16, bitcast=True))
    bf16 = widen(half.to(tl.bfloat16, bitcast=True))
    return tl.where(dtype == 1, f16, bf16)


@device_function
def _rounded(x, dtype):
    return tl.where(dtype == 1, bits(round_to(x, tl.float16)), bits(round_to(x, tl.bfloat16)))


@device_function
def replace_stale(x, tensor, i, mask, ALIGNED: tl.constexpr):
    """Replace fp32 numbers that do not round to the elements of a 16-bit tensor by the elements."""
    address, dtype = tensor
    at = pointer(address, tl.int16, ALIGNED) + i
    half = tl.load(at, mask=where_also(mask, address != 0), other=0)
    is_stale = where_also(half != _rounded(x, dtype), address != 0)
    return tl.where(is_stale, _widened(half, dtype), x)


@device_function
def store_half(tensor, i, x, mask, ALIGNED: tl.constexpr):
    """Store fp32 numbers in a 16-bit tensor, rounded to nearest."""
    address, dtype = tensor
    at = pointer(address, tl.int16, ALIGNED) + i
    tl.store(at, _rounded(x, dtype), mask=where_also(mask, address != 0))


@device_function
def store_state(
    tensor,
    i,
    x,
    mask,
    rounding,
    pair: tl.constexpr,
    shift: tl.constexpr,
    PLAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store fp32 numbers in a tensor of state.

    Args:
        rounding: whether rounding to bf16 is stochastic, the noise's seed, and the index in the
            tensor of element 0.
    """
    address, dtype = tensor
    mask = where_also(mask, address != 0)
    at = pointer(address, tl.float32, ALIGNED) + i
    if PLAIN:
        tl.store(at, x, mask=mask)
    else:
        is_stochastic, seed, begin = rounding
        tl.store(at, x, mask=where_also(mask, dtype == 0))
        if is_stochastic & (dtype == 2):
            random_bits = (noise(seed, tl.cast(i, tl.int64) + begin, pair) >> shift) & 0xFFFF
            half_at = pointer(address, tl.int16, ALIGNED) + i
            tl.store(half_at, stochastic_bf16(x, random_bits), mask=mask)
        else:
            store_half(tensor, i, x, where_also(mask, dtype != 0), ALIGNED)


@device_function
def final_gradient(grad, param, inv_scale, coefficient, l2):
    """Return the gradient unscaled, clipped, and with L2 regularization."""
    grad = grad * inv_scale * coefficient
    return tl.where(l2 == 0.0, grad, grad + l2 * param)


@device_function
def update_segment(update: tl.constexpr, tensors, dtypes, count, arguments):
    """Call update(tensors, i, mask, arguments, PLAIN, ALIGNED) for blocks of a segment.

    Args:
        tensors: results of tensor_at. All must be aligned for 16-byte accesses.
        dtypes: not 0 where a tensor other than a copy is not fp32.
    """
    addresses = tensors[0][0]
    for k in tl.static_range(1, len(tensors)):
        addresses |= tensors[k][0]
    whole = count // ROW if addresses & 15 == 0 else count - count
    rows = tl.arange(0, ROWS)
    for done in range(0, whole, ROWS):
        i = rows_of(rows + done, ROW)
        mask = (rows < tl.cast(min(whole - done, ROWS), tl.int32))[:, None]
        if dtypes == 0:
            update(tensors, i, mask, arguments, True, True)
        else:
            update(tensors, i, mask, arguments, False, True)
    for done in range(whole * ROW, count, ROWS):
        mask = rows < tl.cast(min(count - done, ROWS), tl.int32)
        update(tensors, rows + done, mask, arguments, False, False)


@device_function
def advance_steps(table, size, ticket):
    """Count the update of every tensor in the last program; no other reads a step then."""
    if is_last(pointer(ticket, tl.int32), tl.num_programs(0)):
        entries = pointer(table, tl.int64)
        for first in range(0, number(size), TENSORS):
            tensor = first + tl.arange(0, TENSORS)
            mask = tensor < size
            word = entries + (tensor * ENTRY_WORDS + STEP_WORD)
            step = pointer(tl.load(word, mask=mask, other=0), tl.float32)
            done = tl.load(step, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(step, done + 1.0, mask=mask)
