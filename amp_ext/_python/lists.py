"""The ops on lists: their checks, and their bodies of torch's ops. Where Triton's kernels serve the
device, they take the place of the bodies.

No body waits for a device. Each is called below autograd and autocast (ops.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from amp_ext._python import triton
from amp_ext._python.checks import (
    HALVES,
    Arguments,
    Span,
    check_device,
    check_max_norm,
    check_no_history,
    check_no_internal_overlap,
    check_not_negated,
    checked_dtype,
    checked_grads,
    checked_span,
    is_dense,
    overlaps,
)

UNSCALE, CHECK_FINITE, GRAD_NORM = (
    "amp_ext::unscale_",
    "amp_ext::check_finite",
    "amp_ext::grad_norm",
)
CAST, UPDATE_SCALE = "amp_ext::cast_", "amp_ext::update_scale_"
FLT_MIN, FLT_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def mark_written(*tensors: Tensor | None) -> None:
    """Lets autograd know."""
    given = [t for t in tensors if t is not None and not t.is_inference()]
    torch.autograd.graph.increment_version(given)


def as_stored(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Without their signs, of negated views, on which nothing depends."""
    return [tensor._neg_view() if tensor.is_neg() else tensor for tensor in tensors]


def writing_inference_tensors(written: Sequence[Tensor]) -> AbstractContextManager[None]:
    """torch refuses to write them outside of inference mode."""
    return torch.inference_mode() if any(t.is_inference() for t in written) else nullcontext()


# ---- unscale_, check_finite and grad_norm ------------------------------------------------------


def unscale_(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    check_max_norm(UNSCALE, max_norm, norm)
    device = found_inf.device
    spans = checked_grads(UNSCALE, grads, device, written=True)
    arguments = Arguments(UNSCALE, device)
    arguments.one("inv_scale", inv_scale)
    arguments.one("found_inf", found_inf, written=True)
    arguments.one("norm", norm)
    arguments.check_apart_from(spans, written=True)
    unscale_checked(grads, found_inf, inv_scale, norm, max_norm)


def unscale_checked(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    limit = math.inf if max_norm is None else max_norm
    grads = as_stored(grads)
    if triton.serves("unscale", found_inf.device):
        triton.unscale_(grads, found_inf, inv_scale, norm, limit)
    else:
        with writing_inference_tensors([*grads, found_inf]):
            _unscale(grads, found_inf, inv_scale.reshape(()), norm, limit)
    mark_written(*grads, found_inf)


def _unscale(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    factor: Tensor,
    norm: Tensor | None,
    max_norm: float,
) -> None:
    if norm is not None:
        norm = norm.reshape(())
        finite = norm.isfinite()
        coefficient = clip_coefficient(norm, max_norm)
        found_inf.masked_fill_(~finite, 1.0)
        # Factors of 1 leave gradients as they are.
        factor, coefficient = factor.where(finite, 1.0), coefficient.where(finite, 1.0)
        if found_inf.is_cpu and factor == 1 and coefficient == 1:
            return
    elif found_inf.is_cpu and factor == 1:
        return _check_finite(grads, found_inf)
    whole = [grad for grad in grads if grad.dtype not in HALVES]
    if whole:
        torch._foreach_mul_(whole, factor)
        if norm is not None:
            torch._foreach_mul_(whole, coefficient)
    for grad in grads:
        if grad.dtype in HALVES:
            product = grad.float().mul_(factor)
            grad.copy_(product if norm is None else product.mul_(coefficient))
    _check_finite(grads, found_inf)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """As torch.nn.utils.clip_grads_with_norm_ computes it."""
    limit = torch.tensor(max_norm, dtype=torch.float32).item()
    return ((norm + 1e-6).reciprocal_() * limit).clamp_(max=1.0)


def check_finite(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    spans = checked_grads(CHECK_FINITE, grads, found_inf.device, written=False)
    arguments = Arguments(CHECK_FINITE, found_inf.device)
    arguments.one("found_inf", found_inf, written=True)
    arguments.check_apart_from(spans, written=False)
    check_finite_checked(grads, found_inf)


def check_finite_checked(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    grads = as_stored(grads)
    if triton.serves("check_finite", found_inf.device):
        triton.check_finite(grads, found_inf)
    else:
        _check_finite(grads, found_inf)
    mark_written(found_inf)


def _check_finite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    tensors = [tensor for tensor in tensors if tensor.numel() and not tensor._is_zerotensor()]
    if tensors:
        largest = torch.stack([x.double() for x in torch._foreach_norm(tensors, math.inf)])
        found_inf.masked_fill_(~largest.isfinite().all(), 1.0)


def grad_norm(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor | None = None,
    *,
    norms: Tensor | None = None,
) -> Tensor:
    spans = checked_grads(GRAD_NORM, grads, found_inf.device, written=False)
    arguments = Arguments(GRAD_NORM, found_inf.device)
    arguments.one("found_inf", found_inf, written=True)
    arguments.one("inv_scale", inv_scale)
    arguments.rows("norms", norms, len(grads))
    arguments.check_apart_from(spans, written=False)
    return grad_norm_checked(grads, found_inf, inv_scale, norms)


def grad_norm_checked(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor | None,
    norms: Tensor | None = None,
) -> Tensor:
    grads = as_stored(grads)
    if triton.serves("grad_norm", found_inf.device):
        norm = triton.grad_norm(grads, found_inf, inv_scale, norms)
    else:
        norm = _grad_norm(grads, found_inf, inv_scale, norms)
    mark_written(found_inf, norms)
    return norm


def _grad_norm(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norms: Tensor | None
) -> Tensor:
    factor = None if inv_scale is None else inv_scale.reshape(())
    if factor is not None and factor.is_cpu and factor == 1:
        factor = None
    each = torch.zeros(len(grads), dtype=torch.float64, device=found_inf.device)
    for place, grad in zip(each, grads, strict=True):  # one copy at a time
        product = grad if factor is None else widened(grad) * factor
        torch.linalg.vector_norm(product, dtype=torch.float64, out=place)
    norm = torch.linalg.vector_norm(each).float()
    # Finite squares of FP32 have a finite sum in FP64; those of FP64 may have none.
    found_inf.masked_fill_(~(each.isfinite().all() & norm.isfinite()), 1.0)
    if norms is not None:
        norms.copy_(each)
    return norm


def widened(x: Tensor) -> Tensor:
    """In the type in which factors are applied."""
    return x if x.dtype == torch.float64 else x.float()


# ---- cast_ -------------------------------------------------------------------------------------


def cast_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    check_cast_lengths(outputs, inputs)
    if not outputs:
        return
    device = outputs[0].device
    written, read = [], []
    for index, (output, source) in enumerate(zip(outputs, inputs, strict=True)):
        to, of = f"outputs[{index}]", f"inputs[{index}]"
        checked_dtype(CAST, to, output, device)
        checked_dtype(CAST, of, source, device)
        check_cast_shapes(index, output, source)
        check_not_negated(CAST, to, output)
        if not is_dense(output):
            check_no_internal_overlap(CAST, to, output)
        check_no_history(CAST, to, output)
        written.append(checked_span(CAST, to, output))
        read.append(checked_span(CAST, of, source))
    _check_casts_apart(outputs, inputs, written, read)
    if triton.serves("cast", device):
        triton.cast_(outputs, inputs)
    else:
        with writing_inference_tensors(outputs):
            torch._foreach_copy_(list(outputs), [source.resolve_neg() for source in inputs])
    mark_written(*outputs)


def check_cast_lengths(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if len(outputs) != len(inputs):
        raise RuntimeError(
            f"{CAST}: inputs must have as many tensors as outputs, {len(outputs)}, "
            f"got {len(inputs)}"
        )


def check_cast_shapes(index: int, output: Tensor, source: Tensor) -> None:
    if output.shape != source.shape:
        raise RuntimeError(
            f"{CAST}: inputs[{index}] must have the shape of outputs[{index}], "
            f"{list(output.shape)}, got {list(source.shape)}"
        )


def is_itself(output: Tensor, source: Tensor) -> bool:
    """Whether a tensor is given as its own input."""
    return (
        output.data_ptr() == source.data_ptr()
        and output.dtype == source.dtype
        and not source.is_neg()
        and output.stride() == source.stride()
    )


def _check_casts_apart(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], written: list[Span], read: list[Span]
) -> None:
    order = sorted((i for i, span in enumerate(written) if span[1]), key=written.__getitem__)
    for i, j in zip(order, order[1:]):  # noqa: B905, RUF007
        begin, end = written[i]
        if not is_dense(outputs[i]):  # such views may interleave
            end = begin + outputs[i].element_size()
        if written[j][0] < end:
            first, second = sorted((i, j))
            raise RuntimeError(
                f"{CAST}: outputs[{first}] and outputs[{second}] overlap in memory, expected "
                "tensors that share none: clone() one"
            )
    order = [i for i in order if not is_itself(outputs[i], inputs[i])]
    if not order:
        return
    begins = [written[i][0] for i in order]
    reach = [*accumulate((written[i][1] for i in order), max)]  # the furthest end so far
    for index, span in enumerate(read):
        before = bisect_left(begins, span[1])
        if before and reach[before - 1] > span[0]:
            i = next(i for i in order if overlaps(written[i], span))
            raise RuntimeError(
                f"{CAST}: inputs[{index}] and outputs[{i}] overlap in memory, expected inputs "
                "apart from all that is written: clone() it"
            )


# ---- update_scale_ -----------------------------------------------------------------------------


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
    restarts_hysteresis: bool = False,
    hysteresis_tracker: Tensor | None = None,
    skipped_steps: Tensor | None = None,
    next_step: Tensor | None = None,
    history: Tensor | None = None,
    norm: Tensor | None = None,
) -> None:
    if not found_infs:
        raise RuntimeError(f"{UPDATE_SCALE}: found_infs must hold at least one tensor, got none")
    _check_scale_options(hysteresis, min_scale, max_scale, hysteresis_tracker)
    given = Arguments(UPDATE_SCALE, scale.device)
    given.one("current_scale", scale, written=True)
    given.one("growth_tracker", growth_tracker, written=True, dtype=torch.int32)
    given.one("hysteresis_tracker", hysteresis_tracker, written=True, dtype=torch.int32)
    given.one("skipped_steps", skipped_steps, written=True, dtype=torch.int64)
    given.rows("next_step", next_step, 3)
    if history is not None:
        rows = len(history) if history.dim() == 2 else 0
        if not (2 <= rows <= 2**24 and history.shape[1] == 3):
            raise RuntimeError(
                f"{UPDATE_SCALE}: history must have shape [from 2 to {2**24}, 3], "
                f"got shape {list(history.shape)}"
            )
        given.rows("history", history)
    given.one("norm", norm)
    for found_inf in found_infs:
        span = given.checked_one("found_inf", found_inf)
        if next_step is None or span[0] != next_step.data_ptr() + 4:
            given.add("found_inf", span, written=False)

    factors = growth_factor, backoff_factor, growth_interval
    bounds = (
        _fp32(FLT_MIN if min_scale is None else min_scale),
        _fp32(FLT_MAX if max_scale is None else min(max_scale, FLT_MAX)),
    )
    trackers = growth_tracker, hysteresis_tracker, skipped_steps
    arguments = (
        (scale, trackers, list(found_infs), factors, bounds),
        ((hysteresis, restarts_hysteresis), next_step, history, norm),
    )
    body = triton.update_scale_ if triton.serves("update_scale", scale.device) else _update_scale
    body(*arguments[0], *arguments[1])
    mark_written(scale, *trackers, next_step, history)


def _check_scale_options(
    hysteresis: int, min_scale: float | None, max_scale: float | None, tracker: Tensor | None
) -> None:
    if not 1 <= hysteresis < 2**31:
        raise RuntimeError(
            f"{UPDATE_SCALE}: hysteresis must be from 1 to 2147483647, got {hysteresis}"
        )
    if min_scale is not None and not 0 <= min_scale <= FLT_MAX:
        raise RuntimeError(
            f"{UPDATE_SCALE}: min_scale must be a finite float32 that is not negative, "
            f"got {min_scale:g}"
        )
    if max_scale is not None and not max_scale > 0:
        raise RuntimeError(f"{UPDATE_SCALE}: max_scale must be positive, got {max_scale:g}")
    if hysteresis > 1 and tracker is None:
        raise RuntimeError(
            f"{UPDATE_SCALE}: hysteresis_tracker must be given with hysteresis {hysteresis}, "
            "got None"
        )


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _update_scale(
    scale: Tensor,
    trackers: tuple[Tensor, Tensor | None, Tensor | None],
    found_infs: list[Tensor],
    factors: tuple[float, float, int],
    bounds: tuple[float, float],
    hysteresis: tuple[int, bool],
    next_step: Tensor | None,
    history: Tensor | None,
    norm: Tensor | None,
) -> None:
    growth_tracker, left, skipped_steps = (t if t is None else t.view(()) for t in trackers)
    growth_factor, backoff_factor, interval = factors
    scale = scale.view(())
    overflow = torch.stack([found_inf.reshape(()) for found_inf in found_infs]).ne(0).any()
    before = scale.clone()
    if history is not None:
        last = history[0, 0]
        row = torch.where((last >= 1) & (last < len(history) - 1), last.trunc() + 1, 1.0)
        last.copy_(row)
        norm = torch.full_like(before, math.nan) if norm is None else norm.reshape(())
        record = torch.stack([before, overflow.float(), norm])
        history.index_copy_(0, row.long().reshape(1), record.unsqueeze(0))

    steps = growth_tracker + 1
    grows = ~overflow & (growth_tracker.long() + 1 >= interval)
    growth_tracker.copy_(torch.where(overflow | grows, 0, steps))
    # Once rounded, from FP64.
    smaller = (before.double() * backoff_factor).float().maximum(before.clamp(max=bounds[0]))
    larger = (before.double() * growth_factor).float()
    larger = larger.minimum(before.clamp(min=bounds[1])).where(larger.isfinite(), before)
    after = torch.where(overflow, smaller, torch.where(grows, larger, before))
    if left is not None:
        several, restarts = hysteresis
        if several > 1:
            left.sub_(overflow.int())
            after = before.where(overflow & (left > 0), after)
            if restarts:
                left.masked_fill_(overflow & (left <= 0), several)
        left.masked_fill_(~overflow, several)
    scale.copy_(after)
    if skipped_steps is not None:
        skipped_steps.add_(overflow.long())
    if next_step is not None:
        next_step[2].copy_(next_step[1])
        next_step[1].zero_()
        next_step[0].copy_(scale.reciprocal())


# ---- without data, for torch.compile -----------------------------------------------------------


def check_devices(op: str, device: torch.device, **given: Tensor | Sequence[Tensor] | None) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_device(op, name, value, device)
        elif value is not None:
            for index, tensor in enumerate(value):
                check_device(op, f"{name}[{index}]", tensor, device)


def unscale_fake(grads, found_inf, inv_scale, *, norm=None, max_norm=None) -> None:
    check_max_norm(UNSCALE, max_norm, norm)
    check_devices(UNSCALE, found_inf.device, grads=grads, inv_scale=inv_scale, norm=norm)


def check_finite_fake(grads, found_inf) -> None:
    check_devices(CHECK_FINITE, found_inf.device, grads=grads)


def grad_norm_fake(grads, found_inf, inv_scale=None, *, norms=None) -> Tensor:
    check_devices(GRAD_NORM, found_inf.device, grads=grads, inv_scale=inv_scale, norms=norms)
    return torch.empty((), dtype=torch.float32, device=found_inf.device)


def cast_fake(outputs, inputs) -> None:
    check_cast_lengths(outputs, inputs)
    if outputs:
        check_devices(CAST, outputs[0].device, outputs=outputs, inputs=inputs)
    for index, pair in enumerate(zip(outputs, inputs, strict=True)):
        check_cast_shapes(index, *pair)


def update_scale_fake(scale, growth_tracker, found_infs, *_, **options) -> None:
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    given = {"growth_tracker": growth_tracker, "found_infs": found_infs, **tensors}
    check_devices(UPDATE_SCALE, scale.device, **given)
