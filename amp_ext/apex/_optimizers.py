"""Optimizers that step by themselves after ``amp.scale_loss``, and skip where it overflowed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext import ops, optim
from amp_ext.apex._options import HALVES
from amp_ext.apex._scaler import LossScaler
from amp_ext.apex._state import say
from amp_ext.optim._step import KernelStep, Storage
from amp_ext.scaler.parameters import params_of

_WITH_MASTERS = {
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.SGD: optim.SGD,
}


@dataclass
class Stash:
    """What amp keeps with an optimizer.

    Attributes:
        step: the optimizer's own.
        masters: whether 16-bit parameters have masters, and so float32 gradients.
        scales: whether losses are scaled from the beginning.
        scaler: of the last loss.
        found_inf: whether the next step is to be skipped; None for no loss since the last one.
        before: unscaled gradients of losses before the one whose backward pass runs.
        scaled_at: of which scaler the gradients still have the scale, and its updates then.
        steps: whether its own step has been called.
    """

    step: Callable[..., Any]
    masters: bool
    scales: bool
    scaler: LossScaler | None = None
    found_inf: Tensor | None = None
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scaled_at: tuple[LossScaler, int] | None = None
    steps: bool = False


def check_optimizers(optimizers: list[Optimizer], masters: bool, opt_level: str) -> None:
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if hasattr(optimizer, "_amp_stash") or any(optimizer is o for o in optimizers[:index]):
            raise RuntimeError(
                f"amp.initialize: this {name} has been given to amp.initialize before: make a new "
                "one"
            )
        if not masters:
            continue
        if type(optimizer) not in _WITH_MASTERS and not isinstance(optimizer, KernelStep):
            raise RuntimeError(
                f"amp.initialize: opt_level={opt_level!r} keeps float32 masters of 16-bit weights, "
                f"which Adam, AdamW and SGD of torch.optim and amp_ext.optim can have, got {name}: "
                "write opt_level='O1', under which weights are float32 and any optimizer will do"
            )
        if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                f"amp.initialize: something has replaced the step of this {name}, of which "
                f"opt_level={opt_level!r} makes another: call amp.initialize before it"
            )


def prepare(optimizer: Optimizer, masters: bool, scales: bool) -> None:
    if masters:
        _keep_masters(optimizer)
    optimizer._amp_stash = Stash(optimizer.step, masters, scales)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _step(self, *args, **kwargs)

    step.__wrapped__ = optimizer.step  # for the scaler, which tells other wrappers apart
    step._wrapped_by_lr_sched = True
    optimizer.step = MethodType(step, optimizer)


def _keep_masters(optimizer: Optimizer) -> None:
    """Make it one of amp_ext.optim with masters; it stays the same object."""
    optimizer.__dict__.pop("step", None)  # a scheduler's, which ours stands in for
    optimizer.__class__ = _WITH_MASTERS.get(type(optimizer), type(optimizer))
    optimizer._patch_step_function()
    optimizer._use(replace(getattr(optimizer, "_storage", Storage()), master_weights=True))


# ---- around a backward pass ----------------------------------------------------------------------


def check_before(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Raises for gradients of several scales."""
    stash = optimizer._amp_stash
    if all(param.grad is None for param in params_of(optimizer)):
        stash.scaled_at = None
    if stash.scaled_at not in (None, (scaler, scaler.updates)):
        raise RuntimeError(
            "amp.scale_loss: the optimizer has gradients of a loss with delay_unscale=True, and "
            "its scale is another now: that of another loss_id, or moved by the loss of another "
            "optimizer. Give the losses of each optimizer a loss_id of their own (num_losses= of "
            "amp.initialize), or leave out delay_unscale"
        )


@torch.no_grad()
def before_backward(optimizer: Optimizer, scaler: LossScaler, delay_unscale: bool) -> None:
    stash = optimizer._amp_stash
    if stash.scaled_at is not None:
        return
    given = [param for param in params_of(optimizer) if param.grad is not None]
    # Clones, since the gradients' memory may be DistributedDataParallel's buckets.
    stash.before = [(param, param.grad.detach().clone()) for param in given]
    if delay_unscale and given:  # of zero_grad(set_to_none=False), or unscaled before
        for param, scaled in zip(given, scaler.scale([p.grad for p in given]), strict=True):
            param.grad.copy_(scaled)
    else:
        for param in given:
            param.grad = None
    if stash.masters:
        for param in params_of(optimizer):
            if param.dtype in HALVES and param.grad is None:
                param.grad_dtype = param.dtype


def give_up(optimizer: Optimizer) -> None:
    """After a backward pass that failed: the gradients before it. What it has added to
    gradients that are still scaled stays."""
    stash = optimizer._amp_stash
    if stash.scaled_at is None:
        for param in params_of(optimizer):
            param.grad = None
    for param, grad in stash.before:
        _set_grad(param, grad)
    stash.before = []


def after_delay(optimizer: Optimizer, scaler: LossScaler) -> None:
    stash = optimizer._amp_stash
    stash.before, stash.scaled_at = [], (scaler, scaler.updates)


@torch.no_grad()
def after_backward(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    for optimizer in optimizers:
        if optimizer._amp_stash.masters:
            _to_float32(optimizer)
    found_inf = scaler.unscale_all(optimizers)
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        for param, grad in stash.before:
            _set_grad(param, grad if param.grad is None else param.grad.add_(grad))
        before = found_inf if stash.found_inf is None else stash.found_inf
        stash.scaler, stash.found_inf = scaler, torch.maximum(before, found_inf)
        stash.before, stash.scaled_at = [], None


def _to_float32(optimizer: Optimizer) -> None:
    """Float32 gradients for 16-bit parameters: unscaled, they would vanish in 16 bits."""
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


# ---- the step ------------------------------------------------------------------------------------


def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """In the place of the optimizer's step: as if called by a scaler."""
    stash = self._amp_stash
    if stash.steps:
        return stash.step(*args, **kwargs)
    self._opt_called = True  # for schedulers
    name = type(self).__name__
    if stash.scaled_at is not None:
        raise RuntimeError(
            f"{name}.step: the gradients are scaled, after amp.scale_loss with delay_unscale=True: "
            "leave that out of the last loss before a step"
        )
    closure = args[0] if args else kwargs.get("closure")
    if closure is not None and (stash.scales or stash.scaler is not None):
        raise RuntimeError(
            f"{name}.step: a closure would compute losses after it has been decided whether to "
            "step: compute the loss and its gradients before step()"
        )
    if stash.found_inf is None:
        return stash.step(*args, **kwargs)
    stash.steps = True
    try:
        result, skipped = stash.scaler.step_unless(stash.found_inf, self, *args, **kwargs)
        stash.found_inf = None
    finally:
        stash.steps = False
    if skipped:
        scaler = stash.scaler
        say(f"overflow, step skipped; loss scale {scaler.index} is {scaler.loss_scale()} now")
    return result
