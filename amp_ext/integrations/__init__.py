"""Put the scaler into training frameworks: one module for each framework."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_ext.scaler import GradScaler
from amp_ext.scaler.optimizers import params_of


class Guard(GradScaler):
    """Keep the scale of 1.0 for bfloat16: load none, and save the first one of float16."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state and {**state, "scale": 2.0**16}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict and {**state_dict, "scale": self._init_scale})


def has_gradients_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether an optimizer has the gradients of ``parameters``, and no others."""
    own = {id(param) for param in params_of(optimizer) if param.grad is not None}
    return own == {id(parameter) for parameter in parameters if parameter.grad is not None}


def unscaled_optimizers(scaler: GradScaler | None) -> set[int]:
    """Return the ids of optimizers with unscaled or clipped gradients, for steps to come."""
    states = scaler._per_optimizer_states.items() if scaler is not None else ()
    return {key for key, state in states if state["stage"] is OptState.UNSCALED}


def check_alone(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    """Raise RuntimeError where another optimizer's gradients are unscaled or clipped.

    A framework ends the step with ``scaler.update()``, and so drops the states of all optimizers.
    """
    if unscaled_optimizers(scaler) - {id(optimizer)}:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: another optimizer's gradients have been unscaled or "
            "clipped, and it has not stepped yet. The scaler is updated after each step: clip and "
            "step one optimizer after the other."
        )
