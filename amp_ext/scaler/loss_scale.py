"""Keep the numbers of the scaler on the device."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext._library import _C


class LossScale:
    """Hold the scaler's numbers on the device, always in the same memory.

    A captured CUDA graph finds the numbers there in every replay. The launch that moves the scale
    also counts the step, and makes all other numbers ready for the next step.

    Attributes:
        scale, inv_scale: the scale and its reciprocal, float32 tensors of shape ().
        found_inf, last_found_inf: the first flag of this step and of the last step, likewise.
        next_step: ``inv_scale``, ``found_inf`` and ``last_found_inf`` in one tensor.
        skipped_steps: the number of skipped steps, int64.
        consecutive_skips: the skipped steps since the last other one, int64; None if not counted.
        hysteresis_tracker: the overflows until a backoff, int32; None for a hysteresis of 1.
    """

    @torch.no_grad()
    def __init__(
        self,
        scale: Tensor,
        skipped_steps: int,
        hysteresis_tracker: int | None,
        counts_consecutive: bool,
    ) -> None:
        def number(value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((), value, dtype=dtype, device=scale.device)

        numbers = torch.zeros(4, dtype=torch.float32, device=scale.device)
        # Each view has a version of its own: the scale's shows that a user has written it.
        places = (numbers[i].data for i in range(4))
        self.scale, self.inv_scale, self.found_inf, self.last_found_inf = places
        self.next_step = numbers[1:]
        self.scale.copy_(scale.reshape(()))
        self.skipped_steps = number(skipped_steps, torch.int64)
        self.consecutive_skips = number(0, torch.int64) if counts_consecutive else None
        self.hysteresis_tracker = None
        if hysteresis_tracker is not None:
            self.hysteresis_tracker = number(hysteresis_tracker, torch.int32)
        self._is_flag_taken = False
        self._seen: tuple[Tensor, int, int] | None = None

    def sync(self, scale: Tensor) -> None:
        """Renew the reciprocal if the scale has been written or replaced."""
        seen = self._seen
        if seen is None or seen[0] is not scale or seen[1:] != _version(scale):
            torch.reciprocal(scale.detach().reshape(()), out=self.inv_scale)
            self._seen = scale, *_version(scale)

    def acquire_flag(self) -> dict[torch.device, Tensor]:
        """Return ``found_inf``, set to 0, by its device. One pass of a step may have it.

        A pass that fails may have written the flag, and so keeps it.
        """
        if self._is_flag_taken:
            return {}
        self._is_flag_taken = True
        return {self.found_inf.device: self.found_inf}

    def release_flag(
        self, acquired: Mapping[Any, Tensor], used: Mapping[Any, Tensor] | None
    ) -> None:
        """Take an acquired flag back unless a pass has used it."""
        if acquired:
            self._is_flag_taken = any(flag is self.found_inf for flag in (used or {}).values())

    def update(self, scale: Tensor, tracker: Tensor, flags: list[Tensor], *policy: Any) -> None:
        """Move the scale, count the step and reset the flags, in one launch.

        The policy consists of the factors, the interval, the bounds and the hysteresis.
        """
        counters = self.hysteresis_tracker, self.skipped_steps
        _C.update_scale(scale, tracker, flags, *policy, *counters, self.next_step)
        self._seen = scale, *_version(scale)

    def count_step(
        self, overflows: list[Tensor], above_limit: list[Tensor], is_launched: bool
    ) -> None:
        """Count a skipped step, except for overflows that the launch of update() counts."""
        flags, device = [*overflows, *above_limit], self.scale.device
        if above_limit or not is_launched:
            counted = combined(overflows, device) if is_launched else 0
            self.skipped_steps += (combined(flags, device) - counted).long()
        if self.consecutive_skips is not None and overflows:
            self.consecutive_skips.add_(1).mul_(combined(flags, device) != 0)

    @torch.no_grad()
    def begin_step(
        self, scale: Tensor, flags: list[dict[torch.device, Tensor]], is_launched: bool
    ) -> None:
        """Free ``found_inf``; ``last_found_inf`` takes its place among the flags of the last step.

        The launch of update() has copied the flag; a step without the launch copies it here.
        """
        if not is_launched:
            self.last_found_inf.copy_(self.found_inf)
            self.found_inf.zero_()
            self._seen = None
            self.sync(scale)
        self._is_flag_taken = False
        for each in flags:
            for device, flag in each.items():
                if flag is self.found_inf:
                    each[device] = self.last_found_inf


def combined(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest of the flags, or 0, on a device."""
    is_lazy = device.type != "cpu"  # a copy to the CPU must have arrived before it is read
    flags = [flag.to(device, non_blocking=is_lazy) for flag in flags]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, flags)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
