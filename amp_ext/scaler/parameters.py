"""Parameters whose gradients are unscaled and clipped without their optimizer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

OrParameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


class Parameters:
    """Parameters as an optimizer has them, for what the scaler does with optimizers.

    Args:
        given: a tensor or an iterable of tensors.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, given: Tensor | Iterable[Tensor]) -> None:
        iterable = isinstance(given, Iterable) and not isinstance(given, Tensor)
        params = list(given) if iterable else [given]
        for param in params:
            if not isinstance(param, Tensor):
                of = f" of {type(param).__name__}" if iterable else ""
                raise TypeError(
                    "GradScaler.clip_grad_norm_: expected an optimizer, or parameters as in "
                    "model.parameters(): a tensor or an iterable of tensors, got "
                    f"{type(given).__name__}{of}"
                )
        self.param_groups = [{"params": list({id(param): param for param in params}.values())}]
        self._unscaled: dict[int, Tensor | None] = {}

    def note_unscaled(self) -> None:
        """That the gradients are unscaled which the parameters have now, some perhaps none."""
        self._unscaled = {id(param): param.grad for param in self.param_groups[0]["params"]}

    def unscaled(self) -> dict[int, Tensor]:
        """The parameters that still have these gradients, or none, by their id."""
        return {
            key: param
            for key, param in by_id(self).items()
            if key in self._unscaled and param.grad is self._unscaled[key]
        }


def params_of(optimizer: Any) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def by_id(optimizer: Any) -> dict[int, Tensor]:
    """An optimizer's parameters by their id."""
    return {id(param): param for param in params_of(optimizer)}


def unscaled_with(optimizer: Any) -> dict[int, Tensor]:
    """The parameters whose gradients have been unscaled with an optimizer's."""
    return optimizer.unscaled() if isinstance(optimizer, Parameters) else by_id(optimizer)


def combined(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """By what the scaler's states of several optimizers would skip all of their steps."""
    flags: dict[torch.device, Tensor] = {}
    result = {"found_inf_per_device": flags}
    for state in states:
        for device, found in state["found_inf_per_device"].items():
            flags[device] = torch.maximum(flags[device], found) if device in flags else found
        if "too_long" in state:
            before = result.get("too_long", state["too_long"])
            result["too_long"] = torch.maximum(before, state["too_long"])
    return result
