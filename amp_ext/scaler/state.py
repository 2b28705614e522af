"""Keep the part of the scaler that outlives a step: numbers, reads and checkpoints."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch.amp import GradScaler as TorchsScaler
from torch.optim import Optimizer

from amp_ext.scaler.checkpoint import OWN_ENTRY, checked_state
from amp_ext.scaler.loss_scale import Arriving, LossScale, combined
from amp_ext.scaler.optimizers import Parameters
from amp_ext.scaler.report import NamedParameters, OverflowReport, report_on
from amp_ext.scaler.step_state import StepState


class ScalerState(TorchsScaler):
    """Add counters, reads of the last step and their checkpoints to torch's scaler.

    All tensors are made on the device together with the scale, by the first :meth:`scale`.
    """

    _hysteresis: int
    _max_consecutive_skips: int | None
    _skip_above_norm: float | None
    _init_hysteresis_tracker: int
    _init_skipped_steps: int
    _numbers: LossScale | None
    _last_states: dict[int, StepState]  # of the step that update() has closed

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        with torch.inference_mode(False):  # an update could not write inference tensors
            super()._lazy_init_scale_growth_tracker(dev)
            self._scale = self._step_numbers().scale
            self._step_numbers()

    def _step_numbers(self) -> LossScale:
        """Return the numbers of a step, refreshed if the user replaced the scale."""
        numbers = self._numbers
        if numbers is None or numbers.scale.device != self._scale.device:
            is_counting = self._max_consecutive_skips is not None
            numbers = self._numbers = LossScale(self._scale, *self._counters(), is_counting)
        numbers.sync(self._scale)
        return numbers

    # ---- the current step and the last one -----------------------------------------------------

    def _state_of(self, target: Optimizer | Parameters) -> StepState:
        """Return a target's state in this step. The state keeps optimizers weakly."""
        state = self._per_optimizer_states[id(target)]
        if state.target() is None:
            if isinstance(target, Parameters):
                state.target = lambda: target  # the only reference
            else:
                with suppress(TypeError):  # its class may leave no room for weak references
                    state.target = ref(target)
        return state

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last :meth:`update` closed a step that was skipped.

        The read waits for the device, unless the host has decided on the step itself.
        """
        self._check_skips()
        return any(
            any(flag.item() for flag in state.skip_flags())
            if state.skipped is None
            else state.skipped
            for state in self._last_states.values()
        )

    def _skip_of(self, optimizer: Optimizer) -> Arriving | None:
        """Return an optimizer's flag of the last step for SkipAware; None if the host decided."""
        state = self._last_states.get(id(optimizer))
        if state is None or state.skipped is not None or not (flags := state.skip_flags()):
            return None
        return Arriving(combined(flags, self._scale.device))

    def overflow_report(self, named_parameters: NamedParameters | None = None) -> OverflowReport:
        """Report the gradients that are not finite, after an overflow.

        The overflow is of this step or of the last one: the step that the last :meth:`update`
        closed. Call it before the gradients are cleared. The call waits for the device, and reads
        the gradients of optimizers that had an overflow.

        Args:
            named_parameters: a module, or pairs of a name and a parameter as of
                ``model.named_parameters()``. Other parameters have the names that their optimizer
                was given, or else ``"param_groups[0]['params'][3]"``.
        """
        # A check in this step replaces one in the last step.
        states = [*self._last_states.items(), *self._per_optimizer_states.items()]
        checked = {key: state for key, state in states if state.found_infs}.values()
        overflows = [s for s in checked if any(flag.item() for flag in s.found_infs.values())]
        if not overflows:
            return OverflowReport()
        targets = [target for state in overflows if (target := state.target()) is not None]
        # Optimizers come last, for their names of parameters.
        targets.sort(key=lambda target: not isinstance(target, Parameters))
        return report_on(targets, named_parameters)

    def _check_skips(self) -> None:
        """Raise after max_consecutive_skips skipped steps, in a read that waits anyway.

        The count starts again: a caller that catches the error can read on.
        """
        limit, numbers = self._max_consecutive_skips, self._numbers
        skips = numbers.consecutive_skips if numbers is not None else None
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
        """Return the scale, as ``torch.amp.GradScaler.get_scale``."""
        self._check_skips()
        return super().get_scale()

    def get_skipped_steps(self) -> int:
        """Return the number of skipped steps, by calls of :meth:`update`. Waits for the device."""
        self._check_skips()
        return self._counters()[0]

    def _counters(self) -> tuple[int, int]:
        """Return the number of skipped steps, and the hysteresis tracker."""
        numbers = self._numbers
        if numbers is None:
            return self._init_skipped_steps, self._init_hysteresis_tracker
        return int(numbers.skipped_steps.item()), int(numbers.hysteresis_tracker.item())

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, and counters that differ from their start.

        The counters are in one more entry, ignored by torch: ``"amp_ext"`` holds
        ``skipped_steps`` and ``hysteresis_tracker`` (of ``hysteresis``). Empty when disabled.

        ``torch.distributed.checkpoint`` loads only entries that the scaler to be restored has in
        its state. The state of a new scaler has torch's entries, so that it takes checkpoints of
        torch's scaler. If an ``"amp_ext"`` entry with all three is put into the state, counters are
        loaded too.
        """
        state = super().state_dict()
        if state:
            skipped_steps, tracker = self._counters()
            if skipped_steps or tracker != self._hysteresis:
                state[OWN_ENTRY] = {
                    "skipped_steps": skipped_steps,
                    "hysteresis": self._hysteresis,
                    "hysteresis_tracker": tracker,
                }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``.

        Entries may be numbers of Python or NumPy, or tensors of one element. Counters that the
        state lacks start anew, as does the hysteresis tracker of another ``hysteresis``.

        Raises:
            KeyError: one of torch's entries is missing.
            TypeError: an entry is no number.
            ValueError: an entry is out of range: float32, infinities and NaN included, for
                ``"scale"``; int64 for ``"growth_interval"``; int32 for ``"_growth_tracker"``.
            RuntimeError: ``state_dict`` is empty, as from a disabled scaler.

        Nothing has changed after an error.
        """
        if not self._enabled:
            return
        torchs, counters = checked_state(state_dict)
        super().load_state_dict(torchs)
        tracker = self._hysteresis
        if counters.get("hysteresis") == self._hysteresis:
            tracker = min(counters.get("hysteresis_tracker", tracker), tracker)
        self._init_skipped_steps = counters.get("skipped_steps", 0)
        self._init_hysteresis_tracker = tracker
        if self._scale is None:
            return
        # In place: a captured graph has the addresses.
        numbers = self._step_numbers()
        numbers.skipped_steps.fill_(self._init_skipped_steps)
        numbers.hysteresis_tracker.fill_(tracker)
        if numbers.consecutive_skips is not None:
            numbers.consecutive_skips.zero_()

    def __getstate__(self) -> dict[str, Any]:
        skipped_steps, tracker = self._counters()
        return super().__getstate__() | {
            "_init_skipped_steps": skipped_steps,
            "_init_hysteresis_tracker": tracker,
            "_numbers": None,
            "_last_states": {},
        }
