"""Element types: what each is computed in, how it is rounded, which values are finite.

16-bit types are computed in fp32, fp32 and fp64 in themselves. Under Triton's interpreter bfloat16
goes by way of its bits: the interpreter's own conversions lose the carry of the rounding and
subnormals. Compiled, every function here is one or two instructions an element.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

device_function = (lambda function: function) if INTERPRETED.value else triton.jit
"""Makes what a kernel calls. The interpreter runs a plain function as well, and sooner."""


def _own(function):
    # The same for one of Triton's own functions.
    return function.fn if INTERPRETED.value else function


total = _own(tl.sum)
largest = _own(tl.max)


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
    """Return x in the type in which it is computed, exactly."""
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
    """Return x rounded to nearest even; from fp64 to 16 bits by way of fp32."""
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
    # An fp32 pattern's upper half, one higher where the lower half is more than half a unit, or
    # half a unit and the upper half odd. A NaN could be carried into a zero: it becomes quiet.
    upper = pattern >> 16
    raised = tl.add(pattern, 0x7FFF, sanitize_overflow=False)
    rounded = tl.add(raised, upper & 1, sanitize_overflow=False) >> 16
    return tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, rounded)


@device_function
def infinity(dtype: tl.constexpr):
    """Return the bit pattern of +inf: those of finite numbers are lower, but for the sign."""
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
    """Return the bit patterns without the sign: larger for larger |x|, largest for NaN."""
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
def rows_finite(x):
    """Return where all of a row of x is finite: of a vector, each element is a row."""
    if len(x.shape) == 1:
        return is_finite(x)
    else:
        return largest(magnitude(x), axis=1) < infinity(x.dtype)


@device_function
def rows_of(rows, row: tl.constexpr):
    """Return the offsets of the elements of rows that follow one another."""
    return rows[:, None] * row + tl.arange(0, row)[None, :]


@device_function
def load_rows(at, mask):
    """Load the rows of the mask, and 0 for the others."""
    if len(at.shape) == 1:
        return tl.load(at, mask=mask, other=0)
    else:
        return tl.load(at, mask=mask[:, None], other=0)


@device_function
def store_rows(at, x, mask):
    """Store the rows of the mask."""
    if len(at.shape) == 1:
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, x, mask=mask[:, None])


@device_function
def sum_rows(x):
    """Return the sum of each row."""
    if len(x.shape) == 1:
        return x
    else:
        return total(x, axis=1)


@device_function
def any_row(rows):
    """Return whether something holds for any row."""
    return largest(rows.to(tl.int32), axis=0) != 0
