"""Activations of fp32 numbers."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import libdevice

from amp_ext.triton_kernels.numerics import INTERPRETED, device_function


@device_function
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of x. relu keeps NaN."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        return x * _normal_cdf(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        return x * _logistic(1.5957691 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        return x * _logistic(x)
    else:
        return x


@device_function
def _normal_cdf(x):
    # erfc keeps the digits that 1 + erf would cancel.
    if INTERPRETED:
        return _interpreted_cdf(x.to(tl.float64)).to(tl.float32)
    else:
        return 0.5 * libdevice.erfc(x * -0.70710678)


@device_function
def _interpreted_cdf(x):
    # fp64's 1 + erf is exact enough down to -5. Below, the density is divided by a continued
    # fraction: t + 1 / (t + 2 / (t + 3 / ...)) with t = -x.
    t = tl.where(x < -5.0, -x, 5.0)
    fraction = t
    for numerator in range(16, 0, -1):
        fraction = t + numerator / fraction
    tail = 0.3989422804014327 * tl.exp(-0.5 * t * t) / fraction
    return tl.where(x < -5.0, tail, 0.5 + 0.5 * tl.erf(x * 0.7071067811865476))


@device_function
def _logistic(x):
    # With e = exp(-|x|), 1 / (1 + e) for x > 0 and e / (1 + e) neither cancel nor overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0.0, 1.0, e) / (1.0 + e)
