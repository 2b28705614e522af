"""What a checkpoint of the scaler holds: torch's entries, and the counters of this package."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext.report import NamedParameters, OverflowReport, StepLog, found_infs_of, report_on

_OWN_STATE = "amp_ext"


class ScalerState(torch.amp.GradScaler):
    """torch's scaler with the counters of skipped steps and of hysteresis, which it saves too, and
    with what it says of the last step, which it does not save."""

    def __init__(self, *args: Any, hysteresis: int) -> None:
        super().__init__(*args)
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._init_skipped_steps = 0
        # Created on the device together with the scale.
        self._hysteresis_tracker: Tensor | None = None
        self._skipped_steps: Tensor | None = None
        self._log = StepLog()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._skipped_steps = torch.full(
            (), self._init_skipped_steps, dtype=torch.int64, device=dev
        )
        if self._hysteresis > 1:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
            )

    def get_skipped_steps(self) -> int:
        """Number of calls of :meth:`update` that saw an overflow. Synchronises with the device."""
        if self._skipped_steps is None:
            return self._init_skipped_steps
        return int(self._skipped_steps.item())

    def _get_hysteresis_tracker(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker.item())

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and one named ``"amp_ext"``, which torch ignores, with the counters
        ``skipped_steps`` and ``hysteresis_tracker`` (of ``hysteresis``). Empty when disabled."""
        state = super().state_dict()
        if state:
            state[_OWN_STATE] = {
                "skipped_steps": self.get_skipped_steps(),
                "hysteresis": self._hysteresis,
                "hysteresis_tracker": self._get_hysteresis_tracker(),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of ``torch.amp.GradScaler``.

        Counters that it lacks start anew, as does the hysteresis tracker of another ``hysteresis``.
        Raises KeyError, ValueError or TypeError before anything changes.
        """
        if not self._enabled:
            return
        if state_dict:
            state_dict = {**state_dict, **_checked_state(state_dict)}
        own = state_dict.get(_OWN_STATE, {})
        if not isinstance(own, Mapping):
            raise TypeError(
                f"GradScaler.load_state_dict: {_OWN_STATE!r} must hold a dict, got {own!r}"
            )
        own = {key: _checked_integer(key, value, 63) for key, value in own.items()}
        tracker = self._hysteresis
        if own.get("hysteresis") == self._hysteresis:
            tracker = min(own.get("hysteresis_tracker", tracker), tracker)
        super().load_state_dict(state_dict)
        self._init_skipped_steps = own.get("skipped_steps", 0)
        self._init_hysteresis_tracker = tracker
        if self._skipped_steps is not None:
            self._skipped_steps.fill_(self._init_skipped_steps)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last :meth:`update` closed a step with an overflow. Synchronises with the
        device when it is read."""
        return any(found.item() for found in found_infs_of(self._log.last_states.values()))

    def overflow_report(self, named_parameters: NamedParameters | None = None) -> OverflowReport:
        """Says which gradients are not finite, after an overflow in this step or in the one that
        the last :meth:`update` closed. To be called before the gradients are cleared.

        Synchronises with the device; reads the gradients of optimizers that had an overflow.

        Args:
            named_parameters: a module, or pairs of a name and a parameter as of
                ``model.named_parameters()``. Other parameters have the names that their optimizer
                was given, or else ``"param_groups[0]['params'][3]"``.
        """
        states = self._per_optimizer_states if self._enabled else {}
        return report_on(self._log.overflowed(states), named_parameters, self._log.checked)

    @property
    def checked_in_backward(self) -> int:
        """How many gradients of this step, or else of the one that the last :meth:`update` closed,
        were not read to look for overflow, because the products that wrote them had looked."""
        return self._log.checked

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_skipped_steps"] = self.get_skipped_steps()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_skipped_steps"] = state["_hysteresis_tracker"] = None
        return state


def _checked_integer(key: str, value: Any, bits: int) -> int:
    if int(value) != value or not -(2**bits) <= value < 2**bits:
        raise ValueError(
            f"GradScaler.load_state_dict: {key!r} must be an integer of {bits + 1} bits, "
            f"got {value!r}"
        )
    return int(value)


def _checked_state(state: Mapping[str, Any]) -> dict[str, float | int]:
    """torch's entries as the numbers that they stand for."""
    factors = ("scale", "growth_factor", "backoff_factor")
    return {
        **{key: float(state[key]) for key in factors},
        "growth_interval": _checked_integer("growth_interval", state["growth_interval"], 63),
        "_growth_tracker": _checked_integer("_growth_tracker", state["_growth_tracker"], 31),
    }
