"""Move and save loss scales as Apex does, by :class:`amp_ext.GradScaler`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_ext.scaler import GradScaler
from amp_ext.scaler.loss_scale import combined


class LossScaler(GradScaler):
    """Scale one loss, and move the scale before the optimizers step.

    Args:
        device: type of the device, as in "cuda".
        loss_scale: "dynamic", or a static scale.
        min_loss_scale, max_loss_scale: the limits of a dynamic scale; None for no limit.
    """

    def __init__(
        self,
        device: str,
        loss_scale: float | str,
        min_loss_scale: float | None,
        max_loss_scale: float | None,
    ) -> None:
        is_dynamic = loss_scale == "dynamic"
        super().__init__(
            device,
            min(2.0**16, max_loss_scale or 2.0**16) if is_dynamic else loss_scale,
            allow_fp16_grads=True,
            allow_no_grads=True,
            min_scale=min_loss_scale or None if is_dynamic else None,
            max_scale=max_loss_scale if is_dynamic else None,
            dynamic=is_dynamic,
        )
        self.is_one = loss_scale == 1.0

    def unscale_all(self, optimizers: list[Optimizer]) -> Tensor:
        """Unscale the gradients of optimizers, and update the scale.

        Returns:
            1 if any of them overflowed, else 0; a float32 tensor of shape ().
        """
        flags: list[Tensor] = []
        for optimizer in optimizers:
            self.unscale_(optimizer)
            state = self._state_of(optimizer)
            self._require_checks(optimizer, state)
            flags += state.found_infs.values()
        # A copy, since update() takes the memory of the flags back.
        found_inf = combined(flags, self._scale.device).clone()
        self.update()
        return found_inf

    def step_unless(self, found_inf: Tensor, optimizer: Optimizer) -> float | None:
        """Step an optimizer with unscaled gradients, unless found_inf is 1."""
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        try:
            return self.step(optimizer)
        finally:  # the next update is not about this step
            self._per_optimizer_states.pop(id(optimizer), None)


def to_grad_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a loss, ``amp.state_dict()["loss_scaler0"]``, to a GradScaler's.

    The result has Apex's factors of 2 and 1/2, and Apex's interval of 2000 steps. Raises KeyError
    if ``"loss_scale"`` or ``"unskipped"`` is missing.
    """
    return {
        "scale": state["loss_scale"],
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": state["unskipped"],
    }


def from_grad_scaler(*states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert states of GradScalers, one for each loss, to one for ``amp.load_state_dict``.

    Factors and interval are left out: amp has its own. Raises KeyError for the state of a disabled
    scaler.
    """
    return {
        f"loss_scaler{i}": {"loss_scale": s["scale"], "unskipped": s["_growth_tracker"]}
        for i, s in enumerate(states)
    }
