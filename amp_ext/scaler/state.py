"""What the scaler keeps beside torch's scaler: options, counters, and its last step."""

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp import GradScaler as TorchsScaler
from torch.optim import Optimizer

from amp_ext._warnings import torchs_warnings
from amp_ext.scaler.arriving import Arriving
from amp_ext.scaler.numbers import StepNumbers
from amp_ext.scaler.parameters import Parameters
from amp_ext.scaler.report import NamedParameters, OverflowReport, found_infs_of, report_on

_OWN_STATE = "amp_ext"

_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT64 = float, -sys.float_info.max, sys.float_info.max
# What torch's attributes, and the tensors of this package, can hold.
_TORCHS_ENTRIES = {
    "scale": (float, -_FLOAT32_MAX, _FLOAT32_MAX),
    "growth_factor": _FLOAT64,
    "backoff_factor": _FLOAT64,
    "growth_interval": (int, -(2**63), 2**63 - 1),
    "_growth_tracker": (int, -(2**31), 2**31 - 1),
}
_COUNTERS = {
    "skipped_steps": (int, 0, 2**63 - 1),
    "hysteresis": (int, 1, 2**31 - 1),
    "hysteresis_tracker": (int, -(2**31), 2**31 - 1),
}


class ScalerState(TorchsScaler):
    """torch's scaler with more options, with counters of skipped steps and of hysteresis, which it
    saves too, and with what it says of the last step, which it does not save."""

    def __init__(
        self,
        *args: Any,
        min_scale: float | None,
        max_scale: float | None,
        hysteresis: int,
        max_consecutive_skips: int | None,
        skip_above_norm: float | None,
    ) -> None:
        if min_scale is not None and not 0 <= min_scale <= _FLOAT32_MAX:
            raise ValueError(
                f"GradScaler: min_scale must be a finite float32, not negative, got {min_scale}"
            )
        if max_scale is not None and not max_scale > 0:
            raise ValueError(f"GradScaler: max_scale must be positive, got {max_scale}")
        if min_scale is not None and max_scale is not None and min_scale > max_scale:
            raise ValueError(
                f"GradScaler: min_scale must be at most max_scale, got {min_scale} and {max_scale}"
            )
        hysteresis = _count("hysteresis", hysteresis)
        if max_consecutive_skips is not None:
            max_consecutive_skips = _count("max_consecutive_skips", max_consecutive_skips)
        if skip_above_norm is not None and not skip_above_norm > 0:
            raise ValueError(f"GradScaler: skip_above_norm must be positive, got {skip_above_norm}")
        # Not super(): in amp_ext.cuda.amp's scaler that is torch.cuda.amp's, of other arguments.
        with torchs_warnings():
            TorchsScaler.__init__(self, *args)
        if self._enabled:
            self.set_growth_interval(self._growth_interval)
        self._max_consecutive_skips = max_consecutive_skips
        self._skip_above_norm = skip_above_norm
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._init_skipped_steps = 0
        # Created on the device together with the scale.
        self._hysteresis_tracker: Tensor | None = None
        self._skipped_steps: Tensor | None = None
        self._consecutive_skips: Tensor | None = None
        self._numbers: StepNumbers | None = None
        # The optimizers of this step and of the last one by their id, as torch keeps their states.
        self._optimizers: dict[int, Callable[[], Optimizer | None]] = {}
        self._last_optimizers: dict[int, Callable[[], Optimizer | None]] = {}
        self._last_states: Mapping[int, Mapping[str, Any]] = {}

    def set_growth_interval(self, new_interval: int) -> None:
        """As ``torch.amp.GradScaler.set_growth_interval``."""
        try:
            self._growth_interval = operator.index(new_interval)
        except TypeError:
            raise TypeError(
                f"GradScaler: growth_interval: expected an integer, got {new_interval!r}. Convert "
                "it with int()."
            ) from None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        with torch.inference_mode(False):  # an update could not write what inference mode made
            super()._lazy_init_scale_growth_tracker(dev)
            self._numbers = StepNumbers(self._scale)
            self._scale = self._numbers.scale
            self._numbers.follow(self._scale)
            self._skipped_steps = torch.full(
                (), self._init_skipped_steps, dtype=torch.int64, device=dev
            )
            if self._max_consecutive_skips is not None:
                self._consecutive_skips = torch.zeros((), dtype=torch.int64, device=dev)
            if self._hysteresis > 1:
                self._hysteresis_tracker = torch.full(
                    (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
                )

    def _step_numbers(self) -> StepNumbers:
        """Those of the scale as it is now: somebody may have set or replaced it."""
        if self._numbers is None or not self._numbers.follow(self._scale):
            self._numbers = StepNumbers(self._scale)
            self._numbers.follow(self._scale)
        return self._numbers

    # ---- the current step and the last one -----------------------------------------------------

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """torch's state of the optimizer in this step. Remembers the optimizer, weakly."""
        if id(optimizer) not in self._optimizers:
            try:
                self._optimizers[id(optimizer)] = ref(optimizer)
            except TypeError:  # its class leaves no room for weak references
                self._optimizers[id(optimizer)] = lambda: None
        return self._per_optimizer_states[id(optimizer)]

    def _close_step(self, states: Mapping[int, Mapping[str, Any]], ready: bool) -> None:
        if self._numbers is not None:
            found_infs = (state["found_inf_per_device"] for state in states.values())
            self._numbers.close_step(self._scale, found_infs, ready)
        # Parameters that were clipped by themselves would be kept alive. Their optimizers stay.
        self._last_optimizers = {
            key: find
            for key, find in self._optimizers.items()
            if not isinstance(find(), Parameters)
        }
        self._last_states, self._optimizers = states, {}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last :meth:`update` closed a step that was skipped. Synchronises with the
        device when it is read."""
        self._check_skips()
        return any(
            state["skipped"] if "skipped" in state else any(flag.item() for flag in skips_of(state))
            for state in self._last_states.values()
        )

    def _skip_of(self, optimizer: Optimizer) -> Arriving | None:
        """Whether the step of an optimizer was skipped that was called in the step that the last
        :meth:`update` closed; None if the host has decided that it was to be called."""
        state = self._last_states.get(id(optimizer), {})
        flags = skips_of(state) if state and "skipped" not in state else []
        return Arriving(self._combined_found_inf(flags)) if flags else None

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
        checked = {}  # what has been checked in this step replaces what was in the last one
        for seen, known in ((self._last_optimizers, self._last_states), (self._optimizers, states)):
            for key in seen:
                if key in known and (found := found_infs_of([known[key]])):
                    checked[key] = seen[key], found
        overflowed = [
            find() for find, found in checked.values() if any(flag.item() for flag in found)
        ]
        return report_on(overflowed, named_parameters)

    def _combined_found_inf(self, found_infs: Iterable[Tensor]) -> Tensor:
        device = self._scale.device
        lazy = device.type != "cpu"  # a copy to the CPU must have arrived before it is read
        found_infs = [found.to(device, non_blocking=lazy) for found in found_infs]
        if not found_infs:
            return torch.zeros((), dtype=torch.float32, device=device)
        return functools.reduce(torch.maximum, found_infs)

    # ---- the steps before ----------------------------------------------------------------------

    def _check_skips(self) -> None:
        """Raise for max_consecutive_skips skipped steps. A read that waits anyway calls this.

        The count starts again, so that a caller that catches the error can read on.
        """
        limit, skips = self._max_consecutive_skips, self._consecutive_skips
        if skips is None or skips.item() < limit:
            return
        skips.zero_()
        report, above = self.overflow_report(), self._skip_above_norm
        why = report if report.overflow else f"Norms are above skip_above_norm={above}."
        raise RuntimeError(
            f"GradScaler: the last {limit} steps have been skipped, as many as "
            f"max_consecutive_skips={limit} allows; the scale is {super().get_scale()}. {why}"
        )

    def get_scale(self) -> float:
        """As ``torch.amp.GradScaler.get_scale``."""
        self._check_skips()
        return super().get_scale()

    # ---- counters and checkpoints --------------------------------------------------------------

    def get_skipped_steps(self) -> int:
        """Number of steps that were skipped, by calls of :meth:`update`. Synchronises with the
        device."""
        if self._skipped_steps is None:
            return self._init_skipped_steps
        self._check_skips()
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
        own = state_dict.get(_OWN_STATE, {})
        if not isinstance(own, Mapping):
            raise TypeError(
                f"GradScaler.load_state_dict: {_OWN_STATE!r} must hold a dict, "
                f"got {type(own).__name__}"
            )
        own = {key: _checked(key, own[key], *_COUNTERS[key]) for key in _COUNTERS if key in own}
        tracker = self._hysteresis
        if own.get("hysteresis") == self._hysteresis:
            tracker = min(own.get("hysteresis_tracker", tracker), tracker)
        torchs = _TORCHS_ENTRIES if state_dict else {}
        super().load_state_dict(
            {key: _checked(key, state_dict[key], *limits) for key, limits in torchs.items()}
        )
        if self._scale is not None:
            self._step_numbers()
        if self._consecutive_skips is not None:  # in place: a captured graph has its address
            self._consecutive_skips.zero_()
        self._init_skipped_steps = own.get("skipped_steps", 0)
        self._init_hysteresis_tracker = tracker
        if self._skipped_steps is not None:
            self._skipped_steps.fill_(self._init_skipped_steps)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def __getstate__(self) -> dict[str, Any]:
        skips, self._consecutive_skips = self._consecutive_skips, None  # a copy is no read
        try:
            state = super().__getstate__()
            state["_init_skipped_steps"] = self.get_skipped_steps()
        finally:
            self._consecutive_skips = skips
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_consecutive_skips"] = None
        state["_skipped_steps"] = state["_hysteresis_tracker"] = state["_numbers"] = None
        state["_optimizers"], state["_last_optimizers"], state["_last_states"] = {}, {}, {}
        return state


def skips_of(state: Mapping[str, Any]) -> list[Tensor]:
    """By which an optimizer's step is skipped: its overflows, and a norm above the limit."""
    too_long = state.get("too_long")
    return [*found_infs_of([state]), *([] if too_long is None else [too_long])]


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if not 1 <= count < 2**31:
        raise ValueError(
            f"GradScaler: {name} must be an integer from 1 to 2**31 - 1, got {value!r}"
        )
    return count


def _checked(
    key: str, value: Any, kind: type[float | int], lowest: float, highest: float
) -> float | int:
    """The number that an entry stands for; floats may be infinite or NaN."""
    if isinstance(value, Tensor) and value.numel() == 1:
        with suppress(RuntimeError):  # a meta or fake tensor has no value
            value = value.item()
    elif isinstance(value, Real) and hasattr(value, "item"):  # NumPy's would compare in their dtype
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(
            f"GradScaler.load_state_dict: {key!r} must be a number, got {type(value).__name__}"
        )
    fits = lowest <= value <= highest
    if kind is int:
        fits = fits and value == int(value)
    elif value != value or abs(value) == math.inf:
        fits = True
    if not fits:
        what = "an integer" if kind is int else "a number"
        raise ValueError(
            f"GradScaler.load_state_dict: {key!r} must be {what} from {lowest} to {highest}, "
            f"got {value!r}"
        )
    return kind(value)
