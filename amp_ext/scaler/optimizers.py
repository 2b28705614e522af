"""What the scaler has to know of optimizers, such as those that unscale and skip by themselves."""

import inspect
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

_takes_grad_scaler_of: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Whether its step unscales and skips by itself, given either of torch's two protocols."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether its step looks for the attributes ``grad_scale`` and ``found_inf``."""
    return supports_amp_scaling(optimizer) and not _takes_grad_scaler(optimizer.step)


def takes_step_scalars(optimizer: Optimizer) -> bool:
    """Whether its step reads ``_step_scalars``, as those of ``amp_ext.optim`` do; not for a wrapper
    that has the attributes of such an optimizer, whose step would not find them."""
    return hasattr(type(optimizer), "_takes_step_scalars") and optimizer._takes_step_scalars


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether its step usually skips on the device, so that nobody has to ask on the host."""
    return supports_amp_scaling(optimizer) or hasattr(type(optimizer), "_takes_step_scalars")


def asks_kernels(optimizer: Optimizer) -> bool:
    """Whether it takes step scalars if kernels serve its parameters and gradients."""
    return hasattr(type(optimizer), "_asks_kernels") and optimizer._asks_kernels


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
