"""Loss scales as Apex moves and saves them, by :class:`amp_ext.GradScaler`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_ext.scaler import GradScaler

FACTOR, WINDOW, INIT_SCALE = 2.0, 2000, 2.0**16
_NEVER = 2**31 - 1


class LossScaler(GradScaler):
    """The scaler of one loss. Its update comes at the end of ``amp.scale_loss`` and before the
    steps of the optimizers, which are told of overflows by :meth:`step_unless`.

    Args:
        index: which of the losses.
        device: type of the device, as in "cuda".
        loss_scale: "dynamic", or the scale that stays.
        min_loss_scale, max_loss_scale: where a dynamic scale stops; None for no limit.
    """

    def __init__(
        self,
        index: int,
        device: str,
        loss_scale: float | str,
        min_loss_scale: float | None,
        max_loss_scale: float | None,
    ) -> None:
        self.index = index
        self.dynamic = loss_scale == "dynamic"
        init_scale = min(INIT_SCALE, max_loss_scale or INIT_SCALE) if self.dynamic else loss_scale
        super().__init__(
            device,
            init_scale,
            growth_interval=WINDOW if self.dynamic else _NEVER,
            allow_fp16_grads=True,
            allow_no_grads=True,
            min_scale=min_loss_scale or None if self.dynamic else None,
            max_scale=max_loss_scale if self.dynamic else None,
            dynamic=self.dynamic,
        )
        self.updates = 0
        self._is_one = not self.dynamic and init_scale == 1.0

    @property
    def does_nothing(self) -> bool:
        """Whether the scale is 1 and stays so."""
        return self._is_one

    def loss_scale(self) -> float:
        """Synchronises with the device."""
        return self.get_scale()

    @property
    def _loss_scale(self) -> float:
        return self.get_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.load_apex_state({**self.apex_state(), "loss_scale": value})

    @property
    def _unskipped(self) -> int:
        return self._get_growth_tracker()

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.load_apex_state({**self.apex_state(), "unskipped": value})

    def apex_state(self) -> dict[str, Any]:
        return {"loss_scale": self.get_scale(), "unskipped": self._get_growth_tracker()}

    def load_apex_state(self, state: Mapping[str, Any]) -> None:
        window = WINDOW if self.dynamic else _NEVER
        self.load_state_dict({**to_grad_scaler(state), "growth_interval": window})
        self._is_one = not self.dynamic and float(state["loss_scale"]) == 1.0
        self.updates += 1

    def unscale_all(self, optimizers: list[Optimizer]) -> Tensor:
        """Unscale the gradients of optimizers, and update.

        Returns:
            Whether any of them overflowed, a float32 tensor of shape ().
        """
        flags = []
        for optimizer in optimizers:
            self.unscale_(optimizer)
            flags += self._found_inf_per_device(optimizer).values()
        found_inf = self._combined_found_inf(flags).clone()  # update() takes its memory back
        self.update()
        self.updates += 1
        return found_inf

    def step_unless(
        self, found_inf: Tensor, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> tuple[Any, bool]:
        """The step of an optimizer whose gradients are unscaled, skipped where ``found_inf`` is not
        0: by the optimizer itself where it can, without waiting.

        Returns:
            What it returns, and whether the host knows that it was skipped.
        """
        state = self._state_of(optimizer)
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        try:
            return self.step(optimizer, *args, **kwargs), bool(state.skipped)
        finally:  # the next update is not about this step
            self._per_optimizer_states.pop(id(optimizer), None)
            self._optimizers.pop(id(optimizer), None)


def to_grad_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`amp_ext.GradScaler.load_state_dict`, or torch's, takes for the state of one of
    Apex's loss scalers, ``amp.state_dict()["loss_scaler0"]``: with Apex's factors of 2 and 1/2, and
    its interval of 2000 steps.

    Raises:
        KeyError: ``"loss_scale"`` or ``"unskipped"`` is missing.
    """
    return {
        "scale": state["loss_scale"],
        "growth_factor": FACTOR,
        "backoff_factor": 1 / FACTOR,
        "growth_interval": WINDOW,
        "_growth_tracker": state["unskipped"],
    }


def from_grad_scaler(*states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What ``amp.load_state_dict`` takes for the states of scalers, one for each loss. The factors
    and the interval are not in it: amp has its own.

    Raises:
        KeyError: ``"scale"`` or ``"_growth_tracker"`` is missing, as in that of a disabled scaler.
    """
    return {
        f"loss_scaler{index}": {
            "loss_scale": state["scale"],
            "unskipped": state["_growth_tracker"],
        }
        for index, state in enumerate(states)
    }
