"""Learning-rate schedules that do not count skipped steps."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from amp_ext.scaler import GradScaler
from amp_ext.scaler.loss_scale import Arriving

__all__ = ["SkipAware"]


class SkipAware:
    """Advance a scheduler of torch only for steps that were not skipped.

    Step it after each ``scaler.update()``, in the place of the scheduler::

        scheduler = SkipAware(torch.optim.lr_scheduler.StepLR(optimizer, 1000), scaler)

    If the host decides on the step (HOST), the schedule is exact. If the optimizer skips on the
    device, the host never waits for the last step: the schedule advances. When the step turns out
    to have been skipped, the schedule stands still at the next call. Only the step after a skipped
    one has a rate that is one step ahead. ``exact=True`` waits instead.

    torch's warning about ``lr_scheduler.step()`` before ``optimizer.step()`` does not come up when
    the first steps are skipped. Checkpoints are the scheduler's, with the steps that it is ahead.

    Args:
        scheduler: a scheduler of one optimizer. Its attributes and methods are this object's too.
        scaler: the scaler that steps this optimizer.
        exact: wait for the device at each call.
    """

    def __init__(self, scheduler: LRScheduler, scaler: GradScaler, *, exact: bool = False) -> None:
        self.scheduler = scheduler
        self._scaler = scaler
        self._exact = exact
        self._called = False
        self._last: Arriving | None = None
        self._ahead = 0
        scheduler.optimizer.register_step_post_hook(self._note_call)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()  # waits for the device
        return vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.scheduler.optimizer.register_step_post_hook(self._note_call)

    def _note_call(self, *_: Any) -> None:
        self._called = True

    # The hook touches no gradient, and is called after replays too.
    _note_call._counts_steps = True  # type: ignore[attr-defined]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler after a step that was not skipped; otherwise do nothing."""
        self._settle()
        called, self._called = self._called, False
        if not called:
            return
        self._last = self._scaler._skip_of(self.scheduler.optimizer)
        if self._exact:
            self._settle()
        if self._ahead:
            self._ahead -= 1
        else:
            self.scheduler.step(*args, **kwargs)

    def _settle(self) -> None:
        """Read whether the last step was skipped; the schedule has advanced for it."""
        if self._last is not None:
            self._ahead += self._last.read() != 0
            self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and how many steps it is ahead. Waits for the device."""
        self._settle()
        ahead = {"amp_ext_ahead": self._ahead} if self._ahead else {}
        return self.scheduler.state_dict() | ahead

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the scheduler's."""
        self._last = None
        self._ahead = state_dict.get("amp_ext_ahead", 0)
        rest = {key: value for key, value in state_dict.items() if key != "amp_ext_ahead"}
        self.scheduler.load_state_dict(rest)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not made yet, as within copy.copy
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] == "_" or name == "scheduler" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)
