"""Decide on the hand-over of a step to an optimizer."""

import inspect
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.optim._step import KernelStep


class Handover(Enum):
    """Name the party that unscales and clips gradients and skips the step.

    Attributes:
        HOST: the scaler. It calls step() with unscaled gradients, or not at all.
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
    """Return whether step() has the deprecated argument ``grad_scaler``, and drives the scaler."""
    is_own = isinstance(optimizer, KernelStep)
    return not is_own and _supports_amp_scaling(optimizer) and _takes_grad_scaler(optimizer.step)


def _supports_amp_scaling(optimizer: Any) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _takes_grad_scaler(step: Any) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


# torch's fused SGD allocates momentum without initialising it. After an overflow it leaves before
# the momentum is written, and the next step reads it. The momentum that a skipped step allocates is
# set to zero. An optimizer's first step examines all states, a later step only new ones.
_known_states: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def params_without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return parameters without momentum, before an SGD optimizer's first step."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer in _known_states:
        return []
    _known_states[optimizer] = len(optimizer.state)
    return [p for p, state in optimizer.state.items() if state.get("momentum_buffer") is None]


def zero_unwritten_momentum(optimizer: Optimizer, params: list[Tensor], found_inf: Tensor) -> None:
    """Zero the momentum of these and new parameters where found_inf is not 0."""
    known = _known_states.get(optimizer)
    if known is None or (len(optimizer.state) == known and not params):
        return
    _known_states[optimizer] = len(optimizer.state)
    for param in [*params, *list(optimizer.state)[known:]]:
        momentum = optimizer.state[param].get("momentum_buffer")
        if momentum is not None:
            is_skipped = found_inf.to(momentum.device, non_blocking=momentum.is_cuda) != 0
            momentum.detach().masked_fill_(is_skipped, 0.0)
