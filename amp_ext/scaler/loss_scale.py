"""Keep the numbers of the scaler on the device, and copy them to the host."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.scaler.processes import is_distributed
from amp_ext.scaler.step_state import StepState

MOST_FLAGS = 448
"""The flags that update_scale_ takes."""


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
        hysteresis_tracker: the overflows until a backoff, int32.
    """

    @torch.no_grad()
    def __init__(
        self,
        scale: Tensor,
        skipped_steps: int,
        hysteresis_tracker: int,
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
        self.hysteresis_tracker = number(hysteresis_tracker, torch.int32)
        self._is_flag_taken = False
        self._seen: tuple[Any, ...] = (None,)

    def sync(self, scale: Tensor) -> None:
        """Renew the reciprocal if the scale may have been written or replaced.

        NumPy and torch.distributed write it without a new version. Each step renews it, except on
        the GPU of a single process, where that would be a launch for little.
        """
        is_due = not self._is_flag_taken and (scale.device.type == "cpu" or is_distributed())
        seen = self._seen
        if is_due or seen[0] is not scale or seen[1:] != (scale.data_ptr(), scale._version):
            is_number = scale.dim() == 0 and not scale.requires_grad
            value = scale if is_number else scale.detach().reshape(())
            torch.reciprocal(value, out=self.inv_scale)
            self._note(scale)

    def _note(self, scale: Tensor) -> None:
        self._seen = scale, scale.data_ptr(), scale._version

    def acquire_flag(self) -> dict[torch.device, Tensor]:
        """Return ``found_inf``, which is 0, by its device. The first pass of a step has it."""
        if self._is_flag_taken:
            return {}
        self._is_flag_taken = True
        return {self.found_inf.device: self.found_inf}

    def update(self, scale: Tensor, tracker: Tensor, flags: list[Tensor], **policy: Any) -> None:
        """Move the scale by a policy, count the step and reset the flags, in one launch."""
        if len(flags) > MOST_FLAGS:  # of an optimizer for each parameter, perhaps
            flags = [combined(flags, scale.device)]
        ops.update_scale_(
            scale,
            tracker,
            [_sent_to(scale.device, flag) for flag in flags],
            **policy,
            hysteresis_tracker=self.hysteresis_tracker,
            skipped_steps=self.skipped_steps,
            next_step=self.next_step,
        )
        self._note(scale)

    @torch.no_grad()
    def close_step(self, scale: Tensor, states: Iterable[StepState], is_launched: bool) -> None:
        """Free ``found_inf`` for the next step, and count a skipped step.

        ``last_found_inf`` takes its place in the states. The launch of :meth:`update` has copied
        the flag and counted overflows; without the launch, both are done here.
        """
        if not is_launched:
            self.last_found_inf.copy_(self.found_inf)
            self.found_inf.zero_()
            self.sync(scale)  # here, for replays of a captured update
        self._is_flag_taken = False
        overflow_flags, limit_flags, device = [], [], self.scale.device
        for state in states:
            for place, flag in state.found_infs.items():
                if flag is self.found_inf:
                    state.found_infs[place] = self.last_found_inf
            overflow_flags += state.found_infs.values()
            limit_flags += [] if state.above_limit is None else [state.above_limit]
        flags = [*overflow_flags, *limit_flags]
        if limit_flags or not is_launched:
            counted = combined(overflow_flags, device) if is_launched else 0
            self.skipped_steps += (combined(flags, device) - counted).long()
        if self.consecutive_skips is not None and overflow_flags:
            self.consecutive_skips.add_(1).mul_(combined(flags, device) != 0)


class Arriving:
    """Copy a tensor of one element to the host. Reading waits for the copy, and no later work."""

    def __init__(self, tensor: Tensor) -> None:
        # Devices other than CUDA have no event for the arrival of an asynchronous copy.
        self._number = tensor.detach().to("cpu", non_blocking=tensor.is_cuda, copy=True)
        self._sent: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> float:
        if self._sent is not None:
            self._sent.synchronize()
        return self._number.item()


def combined(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest of the flags, or 0, on a device."""
    flags = [_sent_to(device, flag) for flag in flags]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, flags)


def _sent_to(device: torch.device, flag: Tensor) -> Tensor:
    # A copy to the CPU must have arrived before it is read.
    return flag.to(device, non_blocking=device.type != "cpu")
