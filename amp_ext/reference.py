"""The oracle: what each op of amp_ext promises, in plain torch.

The functions have the names and arguments of the ops (see amp_ext.ops), write to the same
arguments, and work on tensors of any device. They are made to be read, not to be fast, and they
assume valid arguments: the errors for invalid ones belong to the ops.

Rounding. Arithmetic is done in fp64 and rounded into the type in which the op does it. The product
of two fp32 numbers is exact in fp64 (24 + 24 significant bits in 53, exponents well within range),
so rounding it once to fp32 is the correctly rounded fp32 product, subnormal results included. For
fp16 and bf16 gradients the op forms that fp32 product and rounds it a second time, to the type of
the gradient; rounding the exact product straight to fp16 would differ in rare cases, so it is not
done here either. `unscale_`, `check_finite`, `cast_` and `update_scale_` are therefore exact: an
op agrees with them bit for bit (NaN payloads apart). `grad_norm` carries the rounding error of a
sum in fp64.

`gemm`, `linear` and `mlp` return new tensors and are differentiable, as often as one likes, with
gradients that are formed in fp64 too and rounded once to the dtype of their tensor. An op
accumulates in fp32 in an order of its own, so it agrees with them to the rounding error of such
sums, and bit for bit where every partial sum is representable in fp32, as with small integers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_ext._reference_products import (
    gemm,
    gemm_accumulate_,
    gemm_times_derivative,
    gemm_with_aux,
    linear,
    mlp,
)

__all__ = [
    "FLT_MIN",
    "cast_",
    "check_finite",
    "clip_coefficient",
    "gemm",
    "gemm_accumulate_",
    "gemm_times_derivative",
    "gemm_with_aux",
    "grad_norm",
    "linear",
    "mlp",
    "unscale_",
    "update_scale_",
]

FLT_MIN = torch.finfo(torch.float32).tiny
"""The smallest normal fp32 number, 2**-126: the floor of the scale when no min_scale is given."""


def unscale_(
    grads: list[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Multiply gradients by inv_scale in place and look for overflow.

    grads[i] := round(grads[i] * inv_scale * coefficient), found_inf := 1 if a gradient or a rounded
    product is inf or NaN. Products are formed in this order, each rounded to fp32; those of fp64
    gradients to fp64. Factors of exactly 1 leave every bit as it is.

    Args:
        grads: tensors of float16, bfloat16, float32 or float64 and any shape, in any mix.
        found_inf: float32, 1 element; only ever set to 1, never cleared.
        inv_scale: float32, 1 element.
        norm: float32, 1 element: the L2 norm of grads * inv_scale. The coefficient, 1 without a
            norm, is then min(1, max_norm / (norm + 1e-6)); see `clip_coefficient`. A norm that is
            inf or NaN sets found_inf to 1 and leaves the gradients as they are. A finite norm says
            that they are finite, so factors of exactly 1 leave nothing to do.
        max_norm: what the norm is clipped to; None stands for inf.
    """
    factors = inv_scale.item(), 1.0
    if norm is not None:
        if not torch.isfinite(norm):
            found_inf.fill_(1.0)
            return
        limit = math.inf if max_norm is None else max_norm
        factors = inv_scale.item(), clip_coefficient(norm, limit).item()
        if factors == (1.0, 1.0):
            return
    check_finite(grads, found_inf)
    if factors == (1.0, 1.0):
        return
    for grad in grads:
        grad.copy_(_product(_product(grad, factors[0]), factors[1]))
    check_finite(grads, found_inf)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) in fp32, as torch's clip_grads_with_norm_ forms it.

    Source: torch/nn/utils/clip_grad.py. torch divides a number by a tensor by multiplying with the
    reciprocal, so there are three roundings: of the sum, of its reciprocal and of the product.
    """
    return torch.clamp((norm + 1e-6).reciprocal() * max_norm, max=1.0)


def check_finite(grads: list[Tensor], found_inf: Tensor) -> None:
    """Set found_inf to 1 if a gradient has an inf or a NaN.

    Args:
        grads: as for `unscale_`; only read.
        found_inf: float32, 1 element; only ever set to 1, never cleared.
    """
    if not all(bool(torch.isfinite(grad).all()) for grad in grads):
        found_inf.fill_(1.0)


def grad_norm(
    grads: list[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor | None = None,
    *,
    norms: Tensor | None = None,
) -> Tensor:
    """Return the L2 norm of all gradients taken together, and look for overflow.

    norm = sqrt(sum_i sum_j round(grads[i][j] * inv_scale)**2), with the products rounded to fp32
    (those of fp64 gradients to fp64), the squares summed in fp64 and the root rounded once to fp32.
    When all products are finite, the norm is inf only beyond the range of fp32, without a flag.

    Args:
        grads: as for `unscale_`; only read.
        found_inf: float32, 1 element; set to 1 if a product is inf or NaN, never cleared.
        inv_scale: float32, 1 element; None stands for 1.
        norms: float32, shape [len(grads)]; receives the norm of each gradient alone.

    Returns:
        A float32 tensor of shape () on the device of found_inf.
    """
    factor = 1.0 if inv_scale is None else inv_scale.item()
    products = [_product(grad, factor) for grad in grads]
    check_finite(products, found_inf)
    squares = torch.zeros(len(grads), dtype=torch.float64, device=found_inf.device)
    for square, product in zip(squares, products, strict=True):
        square += product.double().square().sum()
    if norms is not None:
        norms.copy_(squares.sqrt())
    return squares.sum().sqrt().float()


def cast_(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Copy each input into the output of the same index, rounded to the output's dtype.

    outputs[i] := round(inputs[i]), to nearest even; from fp64 to fp16 and bf16 by way of fp32, as
    `torch.Tensor.copy_` does. Equal dtypes are copied bit by bit.

    Args:
        outputs: tensors of float16, bfloat16, float32 or float64, in any mix, that share no memory.
        inputs: as many, likewise, each of the shape of its output.
    """
    for output, source in zip(outputs, inputs, strict=True):
        twice = source.dtype == torch.float64 and output.dtype in (torch.float16, torch.bfloat16)
        output.copy_(source.float() if twice else source)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: list[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
    skipped_steps: Tensor | None = None,
) -> None:
    """Move the loss scale after a step: down when a found_inf is set, up after enough without.

    overflow (some found_inf != 0):
        skipped_steps += 1, growth_tracker := 0, and with hysteresis > 1 hysteresis_tracker -= 1;
        unless a hysteresis_tracker > 0 is left,
        scale := max(scale * backoff_factor, min(scale, floor)), floor = min_scale, or 2**-126.
    no overflow:
        hysteresis_tracker := hysteresis, growth_tracker += 1; when that reaches growth_interval,
        growth_tracker := 0 and
        scale := min(scale * growth_factor, max(scale, ceiling)), ceiling = max_scale, or none;
        a product that is not finite leaves the scale as it is. A tracker of 2**31 - 1 that does not
        reach the interval goes on from -2**31.

    Products are formed in fp64 and rounded once to fp32. min and max keep an update from pushing
    the scale past a bound, and leave it where it is when it already lies beyond.

    Args:
        scale: float32, 1 element.
        growth_tracker: int32, 1 element: steps without overflow since the scale last moved.
        found_infs: float32 tensors of 1 element; only read.
        growth_factor: factor of an increase.
        backoff_factor: factor of a decrease.
        growth_interval: number of steps without overflow before an increase.
        min_scale: floor of the scale.
        max_scale: ceiling of the scale.
        hysteresis: number of overflows in a row that it takes to decrease the scale.
        hysteresis_tracker: int32, 1 element: the overflows still to be tolerated; needed when
            hysteresis > 1.
        skipped_steps: int64, 1 element: counts overflows.
    """
    if any(bool(found_inf != 0) for found_inf in found_infs):
        _count_overflow(growth_tracker, skipped_steps)
        if hysteresis > 1:
            hysteresis_tracker -= 1
            if hysteresis_tracker.item() > 0:
                return
        floor = FLT_MIN if min_scale is None else min_scale
        smaller = _product(scale, backoff_factor)
        scale.copy_(torch.maximum(smaller, scale.clamp(max=floor)))
        return

    if hysteresis_tracker is not None:
        hysteresis_tracker.fill_(hysteresis)
    steps = growth_tracker.item() + 1
    growth_tracker += 1
    if steps < growth_interval:
        return
    growth_tracker.zero_()
    larger = _product(scale, growth_factor)
    if not torch.isfinite(larger):
        return
    if max_scale is not None:
        larger = torch.minimum(larger, scale.clamp(min=max_scale))
    scale.copy_(larger)


def _count_overflow(growth_tracker: Tensor, skipped_steps: Tensor | None) -> None:
    growth_tracker.zero_()
    if skipped_steps is not None:
        skipped_steps += 1


def _product(tensor: Tensor, factor: float) -> Tensor:
    """Return tensor * factor rounded to fp32; that of an fp64 tensor stays in fp64."""
    product = tensor.double() * factor
    return product if tensor.dtype == torch.float64 else product.float()
