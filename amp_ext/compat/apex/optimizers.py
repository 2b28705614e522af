"""Optimizers that step after ``amp.scale_loss``, and skip steps after an overflow."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext import ops, optim
from amp_ext.compat.apex.scaler import LossScaler
from amp_ext.compat.casting import HALVES
from amp_ext.optim._step import KernelStep, Storage
from amp_ext.scaler.optimizers import params_of

_WITH_MASTERS = {
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.SGD: optim.SGD,
}


@dataclass
class Stash:
    """The state of amp for an optimizer.

    Attributes:
        step: the optimizer's own step.
        has_masters: whether 16-bit parameters have masters, and so float32 gradients.
        scales: whether losses are scaled from the beginning.
        scaler: the scaler of the last loss.
        found_inf: whether the next step is skipped; None without a loss since the last step.
        before: the gradients of earlier losses, put aside during a backward pass.
    """

    step: Callable[..., Any]
    has_masters: bool
    scales: bool
    scaler: LossScaler | None = None
    found_inf: Tensor | None = None
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def check_optimizers(optimizers: list[Optimizer], has_masters: bool) -> None:
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if hasattr(optimizer, "_amp_stash") or any(optimizer is o for o in optimizers[:index]):
            raise RuntimeError(
                f"amp.initialize: optimizers: expected new ones, got a {name} that amp.initialize "
                "was given before. Make another."
            )
        if not has_masters:
            continue
        if type(optimizer) not in _WITH_MASTERS and not isinstance(optimizer, KernelStep):
            raise RuntimeError(
                "amp.initialize: optimizers: expected Adam, AdamW or SGD for float32 masters, got "
                f"{name}. Write opt_level='O1', which keeps float32 weights."
            )
        if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                f"amp.initialize: optimizers: expected the step of {name}'s class, got another. "
                "Call amp.initialize before you replace step."
            )


def prepare(optimizer: Optimizer, has_masters: bool, scales: bool) -> None:
    """Replace the step of an optimizer, and give it masters."""
    if has_masters:
        optimizer.__dict__.pop("step", None)  # a scheduler's wrapper; the new step replaces it
        optimizer.__class__ = _WITH_MASTERS.get(type(optimizer), type(optimizer))
        optimizer._patch_step_function()
        optimizer._use(replace(getattr(optimizer, "_storage", Storage()), master_weights=True))
    optimizer._amp_stash = Stash(optimizer.step, has_masters, scales)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _step(self, *args, **kwargs)

    step.__wrapped__ = optimizer.step  # the scaler looks through this wrapper
    step._wrapped_by_lr_sched = True
    optimizer.step = MethodType(step, optimizer)


@torch.no_grad()
def before_backward(optimizer: Optimizer) -> None:
    """Put the gradients of earlier losses aside."""
    stash = optimizer._amp_stash
    # Clones, since the gradients' memory may be DistributedDataParallel's buckets.
    stash.before = [
        (p, p.grad.detach().clone()) for p in params_of(optimizer) if p.grad is not None
    ]
    _clear(optimizer)


def restore(optimizer: Optimizer) -> None:
    """Restore the gradients of earlier losses after a backward pass that failed."""
    _clear(optimizer)
    for param, grad in optimizer._amp_stash.before:
        _set_grad(param, grad)
    optimizer._amp_stash.before = []


@torch.no_grad()
def after_backward(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    """Unscale the gradients, and add the gradients of earlier losses."""
    for optimizer in optimizers:
        if optimizer._amp_stash.has_masters:
            _to_float32(optimizer)
    found_inf = scaler.unscale_all(optimizers)
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        for param, grad in stash.before:
            _set_grad(param, grad if param.grad is None else param.grad.add_(grad))
        before = found_inf if stash.found_inf is None else stash.found_inf
        stash.scaler, stash.found_inf = scaler, torch.maximum(before, found_inf)
        stash.before = []


def _clear(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = None
        if optimizer._amp_stash.has_masters and param.dtype in HALVES:
            param.grad_dtype = param.dtype  # also in the buckets of DistributedDataParallel


def _to_float32(optimizer: Optimizer) -> None:
    """Cast gradients of 16-bit parameters to float32, so that unscaling cannot underflow."""
    params = [p for p in params_of(optimizer) if p.grad is not None and p.grad.dtype in HALVES]
    grads = [torch.empty_like(param.grad, dtype=torch.float32) for param in params]
    ops.cast_(grads, [param.grad for param in params])
    for param, grad in zip(params, grads, strict=True):
        _set_grad(param, grad)


def _set_grad(param: Tensor, grad: Tensor) -> None:
    if grad.dtype != param.dtype:
        param.grad = None
        param.grad_dtype = None
    param.grad = grad


def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Make the step of the optimizer by the scaler of the last loss."""
    stash = self._amp_stash
    self._opt_called = True  # for schedulers
    is_users = args or set(kwargs) - {"grad_scaler"}  # torch's scaler passes itself
    if is_users and (stash.scales or stash.scaler is not None):
        raise RuntimeError(
            f"{type(self).__name__}.step: expected no arguments, since amp.scale_loss decides "
            "whether to step. Compute the loss and its gradients before step(), not in a closure."
        )
    found_inf, stash.found_inf = stash.found_inf, None
    if found_inf is None:  # also where the scaler calls this step
        return stash.step(*args, **kwargs)
    try:
        return stash.scaler.step_unless(found_inf, self)
    except BaseException:
        stash.found_inf = found_inf
        raise
