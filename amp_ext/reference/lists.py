"""The oracle of the ops on lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "FLT_MIN",
    "cast_",
    "check_finite",
    "clip_coefficient",
    "grad_norm",
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
    product is inf or NaN. Products are rounded to fp32 one after the other in this order; those of
    fp64 gradients to fp64. Factors of exactly 1 leave every bit as it is.

    The coefficient is 1 without a norm, else min(1, max_norm / (norm + 1e-6)); see
    `clip_coefficient`. A norm that is inf or NaN sets found_inf to 1 and leaves the gradients as
    they are. With a finite norm they are finite, so factors of exactly 1 leave nothing to do.
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
    """Return min(1, max_norm / (norm + 1e-6)) in fp32, as torch's clip_grads_with_norm_ does.

    Source: torch/nn/utils/clip_grad.py. torch divides a number by a tensor by multiplying with the
    reciprocal, so there are three roundings: of the sum, of its reciprocal and of the product.
    """
    return torch.clamp((norm + 1e-6).reciprocal() * max_norm, max=1.0)


def check_finite(grads: list[Tensor], found_inf: Tensor) -> None:
    """Set found_inf to 1 if a gradient has an inf or a NaN."""
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

    ``norm = sqrt(sum_i sum_j round(grads[i][j] * inv_scale)**2)``: products are rounded to fp32
    (to fp64 for fp64 gradients), squares are summed in fp64, and the root is rounded to fp32.
    When all products are finite, the norm is inf only beyond the range of fp32; found_inf := 1 then
    too.
    """
    factor = 1.0 if inv_scale is None else inv_scale.item()
    products = [_product(grad, factor) for grad in grads]
    check_finite(products, found_inf)
    squares = torch.zeros(len(grads), dtype=torch.float64, device=found_inf.device)
    for square, product in zip(squares, products, strict=True):
        square += product.double().square().sum()
    if norms is not None:
        norms.copy_(squares.sqrt())
    norm = squares.sum().sqrt().float()
    if not torch.isfinite(norm):
        found_inf.fill_(1.0)
    return norm


def cast_(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Copy each input into the output of the same index, rounded to the output's dtype.

    outputs[i] := round(inputs[i]), to nearest even; from fp64 to fp16 and bf16 by way of fp32, as
    `torch.Tensor.copy_` does. Equal dtypes are copied bit by bit.
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
    next_step: Tensor | None = None,
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

    Products are rounded once from fp64 to fp32. min and max keep an update from pushing the scale
    past a bound, and leave it where it is when it already lies beyond.

    At the end, next_step := 1 / scale, 0, next_step[1].
    """
    overflow = any(bool(found_inf != 0) for found_inf in found_infs)
    _move_scale(
        scale,
        growth_tracker,
        overflow,
        (growth_factor, backoff_factor, growth_interval),
        (min_scale, max_scale),
        hysteresis,
        hysteresis_tracker,
        skipped_steps,
    )
    if next_step is not None:
        next_step[2] = next_step[1]
        next_step[1] = 0
        next_step[0] = scale.reshape(()).reciprocal()


def _move_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    overflow: bool,
    factors: tuple[float, float, int],
    bounds: tuple[float | None, float | None],
    hysteresis: int,
    hysteresis_tracker: Tensor | None,
    skipped_steps: Tensor | None,
) -> None:
    growth_factor, backoff_factor, growth_interval = factors
    min_scale, max_scale = bounds
    if overflow:
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
