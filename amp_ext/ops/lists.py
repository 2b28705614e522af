"""Define the ops on lists of gradients and weights, one launch each.

Each function's body is the op's reference. It computes in float64 and rounds where the op rounds.
The float64 product of two float32 numbers is exact, so its float32 rounding is the correct one.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext.ops._numbers import (
    CHUNK,
    DTYPES,
    FP64,
    INF,
    NAN,
    full,
    gradients,
    integers,
    numbers,
    placed,
    tensor,
    with_value,
)
from amp_ext.ops._op import Case, cases, op

__all__ = ["unscale_", "check_finite", "grad_norm", "update_scale_", "cast_"]  # noqa: RUF022

FLT_MIN, FLT_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The least and the greatest normal float32 number: the limits of the scale without others."""


@op("grads", "found_inf")
def unscale_(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Multiply gradients by ``inv_scale`` in place and look for infinities and NaNs.

    With a ``norm`` the op clips too: it multiplies products by ``min(1, max_norm / (norm + 1e-6))``
    as ``torch.nn.utils.clip_grads_with_norm_`` does. The device computes that coefficient in
    float32 and rounds each operation: the sum, its reciprocal, times ``max_norm``.

    Args:
        grads: the gradients. Views with holes are fine, also interleaved ones, and negated views.
            Memory that overlaps, within a tensor or between two, is an error. (Between two, a view
            with holes counts by its first element alone.)
        found_inf: float32, 1 element. Set to 1.0 if a product, rounded to its gradient's dtype, is
            not finite; never cleared.
        inv_scale: float32, 1 element. A factor of exactly 1 leaves every bit as it is.
        norm: float32, 1 element: the L2 norm of ``grads * inv_scale``, as :func:`grad_norm` returns
            it. A norm that is not finite sets ``found_inf`` to 1.0 and leaves the gradients as they
            are. If both factors are exactly 1, the op neither reads nor writes them. It does not
            read ``found_inf``.
        max_norm: the limit of the norm, rounded to float32; None stands for no limit.

    float16 and bfloat16 are multiplied in float32, by one factor after the other, and rounded to
    their dtype at the end; float64 is multiplied in float64.

    Raises:
        ValueError: ``max_norm`` is negative or NaN, or there is no ``norm`` for it.
    """
    factors = inv_scale.item(), 1.0
    if norm is not None:
        if not torch.isfinite(norm):
            found_inf.fill_(1.0)
            return
        factors = inv_scale.item(), clip_coefficient(norm, max_norm).item()
        if factors == (1.0, 1.0):
            return
    if factors != (1.0, 1.0):
        for grad in grads:
            grad.copy_(_product(_product(grad, factors[0]), factors[1]))
    _check(grads, found_inf)


def clip_coefficient(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) as torch's clip_grads_with_norm_ does.

    torch divides a number by a tensor by multiplying with the tensor's reciprocal.
    """
    limit = math.inf if max_norm is None else max_norm
    return torch.clamp((norm + 1e-6).reciprocal() * limit, max=1.0)


def _check(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in tensors):
        found_inf.fill_(1.0)


def _product(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, rounded to float32 unless x is float64."""
    product = x.double() * factor
    return product if x.dtype == torch.float64 else product.float()


def _call(grads: list[Tensor], inv_scale: float | None = None, **others: Any) -> dict[str, Any]:
    """Return the arguments of a pass over gradients."""
    scalars = {"inv_scale": tensor(inv_scale)} if inv_scale is not None else {}
    return {"grads": grads, "found_inf": tensor(0.0), **scalars, **others}


@cases(unscale_)
def _unscale_cases() -> Iterator[Case]:
    yield Case("the example", _call(_example_grads(), 0.5, norm=tensor(3.0), max_norm=2.0))
    grads = gradients(numbers(CHUNK + 3))
    yield Case("a factor", _call(grads, 0.3))
    yield Case("products beyond the dtype", _call(grads, 16.0))
    yield Case("an infinity at the end", _call(with_value(-INF, grads, 3, CHUNK + 2), 0.3))
    yield Case("a NaN and a factor of 1", _call(with_value(NAN, grads, 7, 36), 1.0))
    for factor in (0.3, 1.0):
        clip = {"norm": tensor(5.0), "max_norm": 2.0}
        yield Case(f"a factor of {factor}, and clipping", _call(grads, factor, **clip))
    yield Case("a norm that is not finite", _call(grads, 0.3, norm=tensor(INF), max_norm=2.0))
    yield Case("a long list", _call(list(numbers(7001).float().split(5)), 0.3))


def _example_grads() -> list[Tensor]:
    return [full(4.0, 19), full(2.0, 2, 4, dtype=torch.float16).t(), full(12.0).double()]


@op("found_inf")
def check_finite(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    """Look for infinities and NaNs without writing to the gradients.

    Args:
        grads: the gradients.
        found_inf: float32, 1 element. Set to 1.0 if an element is not finite; never cleared.
    """
    _check(grads, found_inf)


@cases(check_finite)
def _check_finite_cases() -> Iterator[Case]:
    yield Case("the example", _call([*_example_grads(), full(INF)]))
    grads = gradients(numbers(CHUNK + 3))
    yield Case("finite gradients", _call(grads))
    values = itertools.cycle((INF, NAN, -INF))
    for i, grad in enumerate(grads):
        for position in {0, CHUNK - 1, CHUNK, grad.numel() - 1}:
            if 0 <= position < grad.numel():
                value = next(values)
                what = f"{value} in element {position} of {grad.dtype}"
                yield Case(what, _call([with_value(value, grads, i, position)[i]]))
    long = numbers(7001).float()
    long[7000] = INF
    yield Case("a long list", _call(list(long.split(5))))


@op("found_inf")
def grad_norm(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None = None
) -> Tensor:
    """Return the L2 norm of ``grads * inv_scale``, and check it, in one read.

    Args:
        grads: the gradients; the op does not write them.
        found_inf: float32, 1 element. Set to 1.0 if a product or the norm is not finite; never
            cleared.
        inv_scale: float32, 1 element; 1 when it is None. The product is float32, or float64 for
            float64 gradients.

    Returns:
        The norm, a 0-dim float32 tensor on the gradients' device: sqrt(sum of squares). The op
        squares and sums in float64 in a fixed order, so that the norm is bitwise the same in every
        run and for any number of threads. A gradient that is not finite makes the norm so.
    """
    factor = 1.0 if inv_scale is None else inv_scale.item()
    squares = torch.zeros((), dtype=torch.float64, device=found_inf.device)
    for grad in grads:
        squares += _product(grad, factor).double().square().sum()
    norm = squares.sqrt().float()  # not finite if a product is not
    _check([norm], found_inf)
    return norm


@cases(grad_norm)
def _grad_norm_cases() -> Iterator[Case]:
    yield Case("the example", _call(_example_grads(), 0.5))
    # Float32 holds the sum of 32 squares exactly.
    grads = gradients(integers(CHUNK + 3, limit=511))
    yield Case("no factor", _call(grads))
    yield Case("a factor", _call(grads, 0.5))
    yield Case("an infinity", _call(with_value(INF, grads, 3, CHUNK), 0.5))
    yield Case("a NaN", _call(with_value(NAN, grads, 0, 0), 0.5))
    yield Case("a norm beyond float32", _call([full(3e38, 5)]))
    yield Case("a long list", _call(list(integers(7001, limit=511).float().split(5)), 0.5))


@op("outputs")
def cast_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copy each input into its output, rounded to the output's dtype.

    A GPU needs one launch for any number of dense tensors and any mix of dtypes, and one more for
    each pair with holes or with elements in different orders. The op is not differentiable:
    weights that require gradients are refreshed under ``torch.no_grad()``.

    Args:
        outputs: strided tensors on one device, of any mix of float16, bfloat16, float32 and
            float64; any shape, alignment and number. Views with holes are fine.
        inputs: as many, likewise, each of the shape of its output and on the same device. They may
            be expanded.

    The result equals ``output.copy_(input)``: rounded to nearest even, subnormal numbers kept, and
    infinite beyond the range of the output's dtype. float64 becomes float16 or bfloat16 by way of
    float32, as there. Equal dtypes are copied bit by bit, NaN payloads too; otherwise a NaN becomes
    some NaN. A tensor that is its own input stays as it is.

    Raises:
        RuntimeError: lists of different length; shapes or devices that differ; an output that is a
            negated view or has elements in the same memory; two outputs that overlap. An input must
            not overlap an output anywhere from its first element to its last.
        NotImplementedError: a tensor that is not strided, or another dtype than the above.
    """
    for output, source in zip(outputs, inputs, strict=True):
        twice = source.dtype == torch.float64 and output.dtype in (torch.float16, torch.bfloat16)
        output.copy_(source.float() if twice else source)


@cases(cast_)
def _cast_cases() -> Iterator[Case]:
    grads = _example_grads()
    outputs = [torch.zeros_like(grad, dtype=torch.bfloat16) for grad in grads]
    yield Case("the example", {"outputs": outputs, "inputs": grads})
    pairs = list(itertools.product(DTYPES, repeat=2))
    for what, size, shift in (("the same alignments", CHUNK + 37, 0), ("other alignments", 150, 1)):
        values = numbers(size)
        values[6:11] = tensor((INF, -INF, NAN, 65520.0, 3.4e38), FP64)
        values[11 : size // 2] = integers(size)[11 : size // 2]
        outputs = placed([torch.zeros(size, dtype=to, device="cpu") for to, _ in pairs])
        inputs = placed([values.to(dtype) for _, dtype in pairs], shift)
        yield Case(what, {"outputs": outputs, "inputs": inputs})
    long = numbers(7001).float()
    halves = list(long.half().split(5))
    yield Case("a long list", {"outputs": halves, "inputs": list((long * 3).split(5))})


@op("scale", "growth_tracker", "hysteresis_tracker", "skipped_steps", "next_step")
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
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
    """Move the loss scale: down after an overflow, up after enough steps without one.

    A step overflowed when any of ``found_infs`` is not 0. Factors are applied in float64 and
    rounded to float32 once, as ``torch._amp_update_scale_`` does, so that scales are bitwise equal.
    No update moves the scale past a bound; a scale beyond a bound stays there.

    Args:
        scale: float32, 1 element, in place.
        growth_tracker: int32, 1 element, in place: steps without overflow since the last change.
        found_infs: from 1 to 448 float32 tensors of 1 element.
        growth_factor: multiplies the scale once the tracker has reached ``growth_interval``, unless
            the result is infinite.
        min_scale: a backoff stops here; the smallest normal float32 (2**-126) when None.
        max_scale: a growth stops here; no limit when None.
        hysteresis: how many consecutive overflows it takes before the scale backs off; each
            overflow that follows backs off again.
        hysteresis_tracker: int32, 1 element, in place, needed when ``hysteresis`` is above 1. It
            starts at ``hysteresis``, and each overflow counts it down. A step without overflow
            resets it.
        skipped_steps: int64, 1 element, in place: counts overflows.
        next_step: float32, shape [3], contiguous, in place: the values that the next step reads.
            The op writes 1 / ``scale`` after the update; 0, the next step's found_inf; and the old
            found_inf. ``found_infs`` may contain the old found_inf.
    """
    if any(bool(found_inf != 0) for found_inf in found_infs):
        growth_tracker.zero_()
        if skipped_steps is not None:
            skipped_steps += 1
        is_due = hysteresis <= 1 or hysteresis_tracker is None
        if hysteresis_tracker is not None and not is_due:
            hysteresis_tracker -= 1
            is_due = hysteresis_tracker.item() <= 0
        if is_due:
            floor = FLT_MIN if min_scale is None else min_scale
            smaller = _product(scale, backoff_factor)
            scale.copy_(torch.maximum(smaller, scale.clamp(max=floor)))
    else:
        if hysteresis_tracker is not None:
            hysteresis_tracker.fill_(hysteresis)
        is_due = growth_tracker.item() + 1 >= growth_interval
        growth_tracker += 1  # 2**31 - 1 goes on from -2**31
        if is_due:
            growth_tracker.zero_()
            larger = _product(scale, growth_factor)
            ceiling = FLT_MAX if max_scale is None else min(max_scale, FLT_MAX)
            if torch.isfinite(larger):
                scale.copy_(torch.minimum(larger, scale.clamp(min=ceiling)))
    if next_step is not None:
        next_step[2] = next_step[1]
        next_step[1] = 0
        next_step[0] = scale.reshape(()).reciprocal()


@cases(update_scale_)
def _update_scale_cases() -> Iterator[Case]:
    def call(*found_infs: float, **changes: Any) -> dict[str, Any]:
        arguments = {
            "scale": tensor(1024.0),
            "growth_tracker": tensor(1, torch.int32),
            "found_infs": [tensor(found_inf) for found_inf in found_infs],
            "growth_factor": 2.1,
            "backoff_factor": 0.3,
            "growth_interval": 2,
            "skipped_steps": tensor(5, torch.int64),
        }
        return {**arguments, **changes}

    def patient(left: int) -> dict[str, Any]:
        return {"hysteresis": 2, "hysteresis_tracker": tensor(left, torch.int32)}

    next_step = {"next_step": tensor([0.0, 1.0, 0.0])}
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
    example = {"scale": tensor(4.0), "growth_tracker": tensor(0, torch.int32)}
    yield Case(
        "the example",
        call(0.0, 1.0, 0.0, **example, **factors, **patient(1), next_step=full(1.0, 3)),
    )
    yield Case("no overflow", call(0.0, growth_interval=3))
    yield Case("growth", call(0.0, 0.0))
    yield Case("growth up to the ceiling", call(0.0, max_scale=1500.0))
    yield Case("growth beyond float32", call(0.0, scale=tensor(3e38)))
    yield Case("an overflow", call(0.0, 1.0))
    yield Case("an overflow in the last of many", call(*(0.0,) * 39, 1.0))
    yield Case("an overflow above the floor", call(1.0, min_scale=1000.0))
    yield Case("an overflow at the floor", call(1.0, scale=tensor(2.0**-126)))
    yield Case("a tolerated overflow", call(1.0, **patient(2)))
    yield Case("a backoff, tolerance used up", call(1.0, **patient(1)))
    yield Case("no overflow, tolerance restored", call(0.0, **patient(1)))
    yield Case("growth, and the next step", call(0.0, **next_step, scale=tensor(3.0)))
