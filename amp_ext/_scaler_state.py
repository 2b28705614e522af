"""What a checkpoint of the scaler holds: torch's entries, and the counters of this package."""

import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, NoReturn

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
        """torch's five entries. Counters that are not where they start are in one more, which torch
        ignores: ``"amp_ext"`` holds ``skipped_steps`` and ``hysteresis_tracker`` (of
        ``hysteresis``). Empty when disabled.

        ``torch.distributed.checkpoint`` loads what the state of the scaler to be restored has
        entries for. A new scaler's has torch's, so that it takes checkpoints of torch's scaler;
        counters are loaded too where an ``"amp_ext"`` entry with all three is put into it."""
        state = super().state_dict()
        if not state:
            return state
        own = {
            "skipped_steps": self.get_skipped_steps(),
            "hysteresis": self._hysteresis,
            "hysteresis_tracker": self._get_hysteresis_tracker(),
        }
        if own["skipped_steps"] or own["hysteresis_tracker"] != self._hysteresis:
            state[_OWN_STATE] = own
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this class or of ``torch.amp.GradScaler``.

        Entries may be numbers of Python's or NumPy's or tensors of one element. Counters that the
        state lacks start anew, as does the hysteresis tracker of another ``hysteresis``.

        Raises:
            KeyError: one of torch's entries is missing.
            TypeError: ``state_dict`` is no dict, or an entry no number.
            ValueError: an entry is beyond what the scaler can hold: float32 for ``"scale"``, in
                which infinities and NaN are, int64 for ``"growth_interval"``, int32 for
                ``"_growth_tracker"``.
            RuntimeError: ``state_dict`` is empty, as that of a disabled scaler.

        Nothing has changed then.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"GradScaler.load_state_dict: expected a dict, got {type(state_dict).__name__}"
            )
        own = _checked_counters(state_dict.get(_OWN_STATE, {}))
        tracker = self._hysteresis
        if own.get("hysteresis") == self._hysteresis:
            tracker = min(own.get("hysteresis_tracker", tracker), tracker)
        super().load_state_dict(_checked_state(state_dict) if state_dict else {})
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
        return report_on(self._log.overflowed(states), named_parameters)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_skipped_steps"] = self.get_skipped_steps()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_skipped_steps"] = state["_hysteresis_tracker"] = None
        return state


# What the tensors and the ops of this package take.
_INTEGERS = {
    "growth_interval": (-(2**63), 2**63 - 1),
    "_growth_tracker": (-(2**31), 2**31 - 1),
}
_COUNTERS = {
    "skipped_steps": (0, 2**63 - 1),
    "hysteresis": (1, 2**31 - 1),
    "hysteresis_tracker": (-(2**31), 2**31 - 1),
}


def _refuse(kind: type[Exception], key: str, expected: str, got: str) -> NoReturn:
    raise kind(f"GradScaler.load_state_dict: {key!r} must {expected}, got {got}")


def _number(key: str, value: Any) -> Real:
    if isinstance(value, Tensor) and value.numel() == 1:
        with suppress(RuntimeError):  # a meta or fake tensor has no value
            value = value.item()
    if not isinstance(value, Real):
        _refuse(TypeError, key, "be a number", type(value).__name__)
    return value


def _checked_float(key: str, value: Any, limit: float = math.inf) -> float:
    number = _number(key, value)
    try:
        result = float(number)
    except OverflowError:
        _refuse(ValueError, key, "fit into float64", "a larger integer")
    if limit < abs(result) < math.inf:
        _refuse(ValueError, key, "fit into float32", repr(result))
    return result


def _checked_integer(key: str, value: Any, lowest: int, highest: int) -> int:
    number = _number(key, value)
    if not lowest <= number <= highest or int(number) != number:
        _refuse(ValueError, key, f"be an integer from {lowest} to {highest}", repr(number))
    return int(number)


def _checked_state(state: Mapping[str, Any]) -> dict[str, float | int]:
    """torch's entries as the numbers that they stand for."""
    return {
        "scale": _checked_float("scale", state["scale"], torch.finfo(torch.float32).max),
        **{key: _checked_float(key, state[key]) for key in ("growth_factor", "backoff_factor")},
        **{key: _checked_integer(key, state[key], *limits) for key, limits in _INTEGERS.items()},
    }


def _checked_counters(own: Any) -> dict[str, int]:
    """The counters among the entries of ``own``."""
    if not isinstance(own, Mapping):
        _refuse(TypeError, _OWN_STATE, "hold a dict", type(own).__name__)
    return {
        key: _checked_integer(key, own[key], *limits)
        for key, limits in _COUNTERS.items()
        if key in own
    }
