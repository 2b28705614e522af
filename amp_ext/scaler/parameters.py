"""Unscale and clip parameters without their optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_ext.scaler.step_state import StepState

OrParameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


class Parameters:
    """Group parameters as an optimizer does, for the passes of the scaler.

    Args:
        source: a tensor or an iterable of tensors.

    Raises:
        TypeError: another source.
    """

    def __init__(self, source: Tensor | Iterable[Tensor]) -> None:
        is_iterable = isinstance(source, Iterable) and not isinstance(source, Tensor)
        params = list(source) if is_iterable else [source]
        for param in params:
            if not isinstance(param, Tensor):
                items = f" of {type(param).__name__}" if is_iterable else ""
                raise TypeError(
                    "GradScaler.clip_grad_norm_: expected an optimizer, or parameters as in "
                    "model.parameters(): a tensor or an iterable of tensors, got "
                    f"{type(source).__name__}{items}"
                )
        self.param_groups = [{"params": list({id(param): param for param in params}.values())}]
        self._unscaled: dict[int, Tensor | None] = {}

    def record_unscaled(self) -> None:
        """Record the current gradients as unscaled."""
        self._unscaled = {id(param): param.grad for param in params_of(self)}

    def unscaled(self) -> dict[int, Tensor]:
        """Return the parameters that still have the recorded gradients, by their id."""
        return {
            key: param
            for key, param in by_id(self).items()
            if key in self._unscaled and param.grad is self._unscaled[key]
        }


class UnscaledGrads:
    """Find the gradients of a target that other targets have unscaled in this step.

    A target is an optimizer, or :class:`Parameters`. Two optimizers share no gradients.

    Attributes:
        states: the states of these other targets.
        left: the parameters with gradients that no other target has unscaled, by their id.
    """

    def __init__(self, target: Any, others: list[Any], states: Mapping[int, StepState]) -> None:
        self.states: list[StepState] = []
        self.left: dict[int, Tensor] = {}
        is_alone = isinstance(target, Parameters)
        others = [other for other in others if is_alone or isinstance(other, Parameters)]
        others = [other for other in others if states[id(other)]["stage"] is not OptState.READY]
        if not others:
            return
        params = self.left = by_id(target)
        for other in others:
            unscaled = other.unscaled() if isinstance(other, Parameters) else by_id(other)
            if not params.keys().isdisjoint(unscaled):
                states[id(other)].require_shareable()
                self.states.append(states[id(other)])
                self.left = {key: p for key, p in self.left.items() if key not in unscaled}


def params_of(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the parameters of all groups."""
    return (param for group in optimizer.param_groups for param in group["params"])


def by_id(optimizer: Any) -> dict[int, Tensor]:
    """Return the parameters of all groups by their id."""
    return {id(param): param for param in params_of(optimizer)}
