"""The scaler's paths from an optimizer's param_groups to the ops on lists: what
csrc/bindings/scaler does, by a loop in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext._python import triton
from amp_ext._python.checks import Arguments, Span, checked_grads
from amp_ext._python.lists import (
    check_finite_checked,
    grad_norm_checked,
    unscale_checked,
    update_scale_,
)
from amp_ext._python.optimizer_step import is_plain, why_not_grad, why_not_param

FoundInfs = dict[torch.device, Tensor]
Reduce = Callable[[FoundInfs, list[Any], Any], Tensor | None]
"""A Reduction of amp_ext.scaler.processes."""

_FP16 = (
    "Attempting to unscale FP16 gradients. Either train FP32 weights under autocast, or FP16 "
    "weights by an optimizer of amp_ext.optim with master_weights=True, or construct the scaler "
    "with allow_fp16_grads=True"
)


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"amp_ext: {name} must be a tensor, got {type(value).__name__}")


class _LeftToTorch(Exception):
    """A gradient that is a tensor subclass, or one that kernels do not serve."""


class _List:
    """Gradients on one device, of one spread."""

    def __init__(self, device: torch.device, spread: int) -> None:
        self.device, self.spread = device, spread
        self.grads: list[Tensor] = []
        self.spans: list[Span] = []


class _Grads:
    """The gradients of one optimizer, in order of first appearance.

    Args:
        op: what errors name.
        written: whether they will be.
        allow_fp16: if not, float16 is an error.
        coalesce_all: add up the duplicates of all sparse gradients, not of those of float16 alone.
        served: take only what the kernels of amp_ext.optim serve.
        by_spread: a list for each way in which they are spread over processes.
        across: whether other processes may have parts of them.
    """

    def __init__(
        self,
        op: str,
        groups: Iterable[dict[str, Any]],
        *,
        written: bool,
        allow_fp16: bool,
        coalesce_all: bool = False,
        served: bool = False,
        by_spread: bool = False,
        across: bool = False,
    ) -> None:
        self.op, self.written = op, written
        self.lists: list[_List] = []
        self.spreads: list[Any] = []
        self._coalesced: list[tuple[Tensor, Tensor]] = []
        self._dtensors: list[Tensor] = []
        found = []
        for param in [param for group in groups for param in group["params"]]:
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(param).__name__}"
                )
            found.append((param, self._spread_of(param) if across else 0))
            taken = is_plain(param) if served else _has_tensors_grad(param)
            if not taken and not (across and _is_dtensor(param)):
                raise _LeftToTorch
        first = found[0][0].device if found else None
        for param, spread in found:
            grad = param.grad
            if grad is None:
                continue
            if across and _is_dtensor(param):
                param, grad = self._local(param)
            if not is_plain(grad):
                raise _LeftToTorch
            if served and (why_not_param(param, first) or why_not_grad(grad, first)):
                raise _LeftToTorch
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(_FP16)
            grad = self._values(param, grad, coalesce_all)
            self._list_for(grad.device, spread if by_spread else 0).grads.append(grad)
        for each in self.lists:
            each.spans = checked_grads(op, each.grads, each.device, written)

    def _spread_of(self, param: Tensor) -> int:
        """An index of self.spreads."""
        spread: Any = None
        if _is_dtensor(param):
            spread = param._spec.mesh, param._spec.placements
        elif hasattr(param, "_fsdp_flattened"):
            spread = "fsdp"
        for index, known in enumerate(self.spreads):
            if known is spread or known == spread:
                return index
        if isinstance(spread, tuple) and any(p.is_partial() for p in spread[1]):
            raise _LeftToTorch  # a sum over processes
        self.spreads.append(spread)
        return len(self.spreads) - 1

    def _local(self, param: Any) -> tuple[Tensor, Tensor]:
        """The parts of a DTensor and of its gradient that this process has."""
        if not _is_dtensor(param.grad) or param.grad._spec.mesh != param._spec.mesh:
            raise _LeftToTorch
        placements = param._spec.placements
        if param.grad._spec.placements != placements:
            param.grad = param.grad.detach().redistribute(param._spec.mesh, placements)
        self._dtensors.append(param.grad)
        local = _wait(param.grad._local_tensor)
        if not is_plain(local) or local.layout is not torch.strided:
            raise _LeftToTorch
        return _wait(param._local_tensor), local

    def _values(self, param: Tensor, grad: Tensor, coalesce_all: bool) -> Tensor:
        """A gradient, or the elements of a sparse one: of float16 its sums may overflow."""
        if grad.layout is not torch.sparse_coo:
            return grad
        if coalesce_all or grad.dtype == torch.float16:
            grad = grad.coalesce()
            self._coalesced.append((param, grad))
        return grad._values()

    def _list_for(self, device: torch.device, spread: int) -> _List:
        for each in self.lists:
            if (each.device, each.spread) == (device, spread):
                return each
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{self.op}: tensors must be on the CPU or a CUDA device, got {device}"
            )
        self.lists.append(_List(device, spread))
        return self.lists[-1]

    def install_coalesced(self) -> None:
        for param, grad in self._coalesced:
            param.grad = grad

    def mark_dtensors_written(self) -> None:
        if self._dtensors:
            torch.autograd.graph.increment_version(self._dtensors)

    def are_all_on(self, device: torch.device) -> bool:
        return all(each.device == device for each in self.lists)


def _has_tensors_grad(param: Tensor) -> bool:
    return is_plain(param) or type(param).grad is Tensor.grad


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def _wait(local: Tensor) -> Tensor:
    """A tensor that may still be on its way from another process."""
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU must have arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _flags(
    grads: _Grads, flag_on: Callable[[torch.device], Tensor], free: Tensor | None = None
) -> FoundInfs:
    """A found_inf for each device: the one that is given and 0, or a new one."""
    flags: FoundInfs = {}
    for each in grads.lists:
        device = each.device
        if device not in flags:
            flags[device] = free if free is not None and free.device == device else flag_on(device)
    return flags


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def _reduced(
    reduce: Reduce | None, grads: _Grads, flags: FoundInfs, norms: Sequence[Tensor] | None = None
) -> Tensor | None:
    """Makes flags and norms those of all processes."""
    if reduce is None:
        return None
    by_spread = None
    if norms is not None:
        by_spread = [[] for _ in grads.spreads]
        for each, norm in zip(grads.lists, norms, strict=True):
            by_spread[each.spread].append(norm)
    return reduce(flags, grads.spreads, by_spread)


@torch.no_grad()
def unscale_grads(
    groups: Iterable[dict[str, Any]],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    allow_fp16: bool,
    reduce: Reduce | None,
) -> FoundInfs | None:
    """{device: found_inf} for gradients, which are multiplied by inv_scale; None where they are
    left to torch, and then nothing has been written. ``found_inf`` is 0 or None."""
    return _unscale_grads(groups, inv_scale, allow_fp16, reduce, _zero, found_inf)


@torch.no_grad()
def unscale_grads_by(
    groups: Iterable[dict[str, Any]],
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
    reduce: Reduce | None,
) -> FoundInfs | None:
    """As unscale_grads, but each found_inf starts as a copy of the given one."""

    def copied(device: torch.device) -> Tensor:
        return found_inf.to(device, non_blocking=device.type != "cpu", copy=True)

    def check(grads: _Grads) -> None:
        _check_tensors(inv_scale=inv_scale, found_inf=found_inf)
        given = Arguments("amp_ext::unscale_", inv_scale.device)
        given.one("inv_scale", inv_scale)
        Arguments("amp_ext::unscale_", found_inf.device).one("found_inf", found_inf)
        for each in grads.lists:
            given.check_apart_from(each.spans, written=True)

    return _unscale_grads(groups, inv_scale, allow_fp16, reduce, copied, None, check)


def _unscale_grads(
    groups: Iterable[dict[str, Any]],
    inv_scale: Tensor,
    allow_fp16: bool,
    reduce: Reduce | None,
    flag_on: Callable[[torch.device], Tensor],
    free: Tensor | None,
    check: Callable[[_Grads], None] = lambda grads: None,
) -> FoundInfs | None:
    options = {"written": True, "allow_fp16": allow_fp16, "across": reduce is not None}
    try:
        grads = _Grads("amp_ext::unscale_", groups, **options)
    except _LeftToTorch:
        return None
    check(grads)
    _check_tensors(inv_scale=inv_scale)
    grads.install_coalesced()
    flags = _flags(grads, flag_on, free)
    for each in grads.lists:
        unscale_checked(each.grads, flags[each.device], _to(inv_scale, each.device))
    grads.mark_dtensors_written()
    _reduced(reduce, grads, flags)
    return flags


@torch.no_grad()
def check_grads(
    groups: Iterable[dict[str, Any]],
    found_inf: Tensor | None,
    for_kernels: bool,
    reduce: Reduce | None,
) -> FoundInfs | None:
    """As unscale_grads, but gradients are only read. None also, with ``for_kernels``, where
    Triton's kernels do not make the step."""
    if for_kernels and not _are_for_kernels(groups):
        return None
    options = {"written": False, "allow_fp16": True, "served": for_kernels}
    try:
        grads = _Grads("amp_ext::check_finite", groups, **options, across=reduce is not None)
    except _LeftToTorch:
        return None
    grads.install_coalesced()
    flags = _flags(grads, _zero, found_inf)
    for each in grads.lists:
        check_finite_checked(each.grads, flags[each.device])
    _reduced(reduce, grads, flags)
    return flags


def _are_for_kernels(groups: Iterable[dict[str, Any]]) -> bool:
    params = [param for group in groups for param in group["params"]]
    return bool(params) and triton.serves("adam", params[0].device)


@torch.no_grad()
def clip_grads(
    groups: Iterable[dict[str, Any]],
    inv_scale: Tensor,
    found_inf: Tensor | None,
    found_infs: FoundInfs | None,
    max_norm: float | None,
    error_if_nonfinite: bool,
    allow_fp16: bool,
    for_kernels: bool,
    reduce: Reduce | None,
) -> tuple[FoundInfs, Tensor] | None:
    """({device: found_inf}, norm) for gradients, which are multiplied by inv_scale and clipped to
    max_norm, or only read where that is None. ``found_infs`` are those of gradients that are
    unscaled already, else None. None as check_grads."""
    if for_kernels and not _are_for_kernels(groups):
        return None
    options = {"written": max_norm is not None, "allow_fp16": allow_fp16, "served": for_kernels}
    more = {"coalesce_all": True, "by_spread": True, "across": reduce is not None}
    try:
        grads = _Grads("amp_ext::grad_norm", groups, **options, **more)
    except _LeftToTorch:
        return None
    if found_infs is None:
        flags = _flags(grads, _zero, found_inf)
    else:

        def before(device: torch.device) -> Tensor:
            flag = found_infs.get(device)
            if flag is None:
                return _zero(device)
            return flag.clone() if error_if_nonfinite else flag  # an error leaves it as it is

        flags = _flags(grads, before)
    norms = []
    for each in grads.lists:
        factor = _to(inv_scale, each.device) if found_infs is None else None
        norms.append(grad_norm_checked(each.grads, flags[each.device], factor))
    of_all = _reduced(reduce, grads, flags, norms)
    norm = _total_norm(norms, inv_scale.device) if of_all is None else of_all
    if len(norms) > 1 and of_all is None:  # each is finite, perhaps, but not the total
        flag = flags[grads.lists[0].device]
        flag.masked_fill_(~_to(norm, flag.device).isfinite(), 1.0)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            "The total norm of order 2.0 for gradients from `optimizer` is non-finite, so it "
            "cannot be clipped. To disable this error and let step() skip the optimizer's step "
            "instead, set `error_if_nonfinite=False`"
        )
    grads.install_coalesced()
    if max_norm is not None:
        for each in grads.lists:
            device = each.device
            by = _to(inv_scale, device) if found_infs is None else torch.ones((), device=device)
            unscale_checked(each.grads, flags[device], by, _to(norm, device), max_norm)
        grads.mark_dtensors_written()
    return flags, norm


def _total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return _zero(device)
    here = [_to(norm, device) for norm in norms]
    if len(here) == 1:
        return here[0]
    # In FP64, where no square overflows.
    return torch.linalg.vector_norm(torch.stack(here), dtype=torch.float64).float()


@torch.no_grad()
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None,
    max_scale: float | None,
    hysteresis: int,
    restarts_hysteresis: bool,
    hysteresis_tracker: Tensor | None,
    skipped_steps: Tensor | None,
    next_step: Tensor | None,
    history: Tensor | None,
    norm: Tensor | None,
) -> None:
    """The op, for found_infs of any device."""
    update_scale_(
        scale,
        growth_tracker,
        [_to(found_inf, scale.device) for found_inf in found_infs],
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        restarts_hysteresis=restarts_hysteresis,
        hysteresis_tracker=hysteresis_tracker,
        skipped_steps=skipped_steps,
        next_step=next_step,
        history=history,
        norm=norm,
    )
