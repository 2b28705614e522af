"""What the scaler has to know of optimizers, such as those that unscale and skip by themselves."""

import inspect
from enum import Enum
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.optim._step import KernelStep

_takes_grad_scaler_of: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class Handover(Enum):
    """Who unscales and clips gradients, and skips the step.

    Attributes:
        HOST: the scaler, which calls step() with unscaled gradients or not at all.
        FOUND_INF: step(), by the attributes ``grad_scale`` and ``found_inf``.
        KERNELS: step() of :mod:`amp_ext.optim`, by ``_step_scalars``.
    """

    HOST = 0
    FOUND_INF = 1
    KERNELS = 2


def handover_of(optimizer: Any) -> Handover:
    """Return the hand-over that a step of the present gradients allows."""
    if isinstance(optimizer, KernelStep):
        if optimizer._is_observed:
            return Handover.HOST
        if optimizer._why_not() is None:
            return Handover.KERNELS
        return Handover.FOUND_INF if optimizer._is_fused else Handover.HOST
    takes_found_inf = _supports_amp_scaling(optimizer) and not _takes_grad_scaler(optimizer.step)
    return Handover.FOUND_INF if takes_found_inf else Handover.HOST


def takes_scaler(optimizer: Any) -> bool:
    """Whether step() has the deprecated argument ``grad_scaler``, and drives the scaler itself."""
    is_own = isinstance(optimizer, KernelStep)
    return not is_own and _supports_amp_scaling(optimizer) and _takes_grad_scaler(optimizer.step)


def _supports_amp_scaling(optimizer: Any) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _takes_grad_scaler(step: Any) -> bool:
    """Whether an optimizer's step has the deprecated parameter ``grad_scaler``.

    Cached by function: reading a signature takes longer than the rest of the hand-over.
    """
    function = getattr(step, "__func__", step)
    if not isinstance(function, FunctionType):
        return "grad_scaler" in inspect.signature(step).parameters
    if function not in _takes_grad_scaler_of:
        _takes_grad_scaler_of[function] = "grad_scaler" in inspect.signature(step).parameters
    return _takes_grad_scaler_of[function]


# A fused SGD step allocates momentum without initialising it and, on an overflow, leaves before it
# is written; from the next step on it is used. So momentum that a step allocates is zeroed if the
# step overflowed. To find it, every parameter is inspected before an optimizer's first step; later
# only a parameter that is new in optimizer.state has none.
_known_states: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def momentum_to_come(optimizer: Optimizer) -> list[Tensor]:
    """Before an optimizer's first step, its parameters without momentum."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer in _known_states:
        return []
    _known_states[optimizer] = len(optimizer.state)
    return [
        param for param, state in optimizer.state.items() if state.get("momentum_buffer") is None
    ]


def zero_unwritten_momentum(optimizer: Optimizer, fresh: list[Tensor], found_inf: Tensor) -> None:
    if optimizer not in _known_states:
        return
    known = _known_states[optimizer]
    if len(optimizer.state) == known and not fresh:
        return
    _known_states[optimizer] = len(optimizer.state)
    for param in [*fresh, *list(optimizer.state)[known:]]:
        momentum = optimizer.state[param].get("momentum_buffer")
        if momentum is not None:
            skipped = found_inf.to(momentum.device, non_blocking=momentum.is_cuda) != 0
            momentum.detach().masked_fill_(skipped, 0.0)
