"""Read the parameters of optimizers, and decide on the hand-over of a step."""

import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.optim._step import KernelStep

OrParameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


class Parameters:
    """Group parameters as an optimizer does."""

    def __init__(self, source: Tensor | Iterable[Tensor]) -> None:
        params = [source] if isinstance(source, Tensor) else source
        self.param_groups = [{"params": list({id(param): param for param in params}.values())}]


def params_of(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the parameters of all groups."""
    return (param for group in optimizer.param_groups for param in group["params"])


class Handover(Enum):
    """Name the party that unscales, clips and skips: see :mod:`amp_ext.scaler.grad_scaler`."""

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
        # torch's step of these groups takes grad_scale and found_inf.
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
    else:
        takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
        is_fused = takes_found_inf and not takes_scaler(optimizer)
    return Handover.FOUND_INF if is_fused else Handover.HOST


def takes_scaler(optimizer: Any) -> bool:
    """Return whether step() has the deprecated argument ``grad_scaler``, and drives the scaler."""
    takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes_found_inf and "grad_scaler" in inspect.signature(optimizer.step).parameters


def momenta(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the momentum buffers of an SGD optimizer by parameter."""
    states = optimizer.state if isinstance(optimizer, torch.optim.SGD) else {}
    buffers = {param: state.get("momentum_buffer") for param, state in states.items()}
    return {param: buffer for param, buffer in buffers.items() if buffer is not None}


def zero_new_momenta(optimizer: Optimizer, old: dict[Tensor, Tensor], found_inf: Tensor) -> None:
    """Zero the momentum buffers that a step has made, where found_inf is not 0.

    torch's fused SGD allocates momentum without initialising it. A skipped step leaves before the
    momentum is written, and the next step would read it.
    """
    for param, momentum in momenta(optimizer).items():
        if param not in old:
            is_skipped = found_inf.to(momentum.device, non_blocking=momentum.is_cuda) != 0
            momentum.detach().masked_fill_(is_skipped, 0.0)
