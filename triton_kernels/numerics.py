"""Element types: addresses, exact widening, rounding, finiteness.

16-bit types are computed in fp32, fp32 and fp64 in themselves. Triton's interpreter loses the carry
of a rounding to bfloat16 and bfloat16's subnormals; there, bits are converted instead. A compiled
conversion is one or two instructions an element.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

device_function = (lambda function: function) if INTERPRETED.value else triton.jit
"""Makes a function for kernels. The interpreter runs a plain function faster."""


def _own(function):
    # Does the same to a function of Triton's.
    return function.fn if INTERPRETED.value else function


total = _own(tl.sum)
largest = _own(tl.max)


@device_function
def number(x):
    """Return an integer as int64. The interpreter is faster with Python's."""
    if INTERPRETED:
        return int(x)
    else:
        return x.to(tl.int64)


@device_function
def double(pattern):
    """Return the fp64 number of a bit pattern."""
    return tl.cast(pattern, tl.int64).to(tl.float64, bitcast=True)


@device_function
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Return an address, ALIGNED if it is a multiple of 16, as a pointer to elements."""
    found = tl.cast(tl.cast(address, tl.int64), tl.pointer_type(dtype))
    return tl.multiple_of(found, 16) if ALIGNED else found


@device_function
def bits(x):
    """Return the bit patterns as signed integers."""
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True)
    elif x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int64, bitcast=True)


@device_function
def widen(x):
    """Return x exactly in the type that computes it."""
    if x.dtype == tl.float16:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        if INTERPRETED:
            return (bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return x.to(tl.float32)
    else:
        return x


@device_function
def round_to(x, dtype: tl.constexpr):
    """Return x rounded to nearest even; fp64 reaches 16 bits through fp32."""
    if x.dtype == dtype:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return round_to(widen(x), dtype)
    elif x.dtype == tl.float64 and dtype.primitive_bitwidth == 16:
        return round_to(x.to(tl.float32), dtype)
    elif INTERPRETED and dtype == tl.bfloat16:
        return _rounded_bits(bits(x)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@device_function
def _rounded_bits(pattern):
    # Ties go to the even upper half. The carry could turn a NaN into a zero: a NaN becomes quiet.
    upper = pattern >> 16
    raised = tl.add(pattern, 0x7FFF, sanitize_overflow=False)
    rounded = tl.add(raised, upper & 1, sanitize_overflow=False) >> 16
    return tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, rounded)


@device_function
def infinity(dtype: tl.constexpr):
    """Return the bit pattern of +inf, above every finite magnitude."""
    if dtype == tl.float16:
        return 0x7C00
    elif dtype == tl.bfloat16:
        return 0x7F80
    elif dtype == tl.float32:
        return 0x7F800000
    else:
        return 0x7FF0000000000000


@device_function
def magnitude(x):
    """Return the bit patterns without the sign: ordered as |x|, NaN last."""
    if x.dtype.primitive_bitwidth == 16:
        return bits(x) & 0x7FFF
    elif x.dtype.primitive_bitwidth == 32:
        return bits(x) & 0x7FFFFFFF
    else:
        return bits(x) & 0x7FFFFFFFFFFFFFFF


@device_function
def is_finite(x):
    """Return where x is neither infinite nor NaN."""
    return magnitude(x) < infinity(x.dtype)


@device_function
def is_row_finite(x):
    """Return where all elements of a row are finite."""
    return largest(magnitude(x), axis=1) < infinity(x.dtype)


@device_function
def is_any(condition):
    """Return whether a condition holds anywhere in a vector."""
    return largest(condition.to(tl.int32), axis=0) != 0
