"""What the steps of the optimizers read on the device, always in the same memory."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class StepNumbers:
    """Float32 numbers on the scale's device: the scale, its reciprocal, a found_inf, and that of
    the last step. An update makes them ready for the next step by the launch that moves the scale.

    They stay where they are, so that a captured CUDA graph finds them in every replay.

    Attributes:
        scale, inv_scale, found_inf, last_found_inf: tensors of shape ().
        next_step: the last three, as ``update_scale_`` takes them.
    """

    @torch.no_grad()
    def __init__(self, scale: Tensor) -> None:
        numbers = torch.zeros(4, dtype=torch.float32, device=scale.device)
        # Each counts its own versions: that of the scale tells when somebody has written it.
        places = (numbers[i].data for i in range(4))
        self.scale, self.inv_scale, self.found_inf, self.last_found_inf = places
        self.next_step = numbers[1:]
        self.scale.copy_(scale.reshape(()))
        self._taken = False
        self._seen: tuple[Tensor, int, int] | None = None

    def follow(self, scale: Tensor) -> bool:
        """Makes the reciprocal anew where the scale has been written, or replaced by another
        tensor. False if that is on another device."""
        if scale.device != self.scale.device:
            return False
        if self._seen is None or self._seen[0] is not scale or self._seen[1:] != _version(scale):
            self._read(scale)
        return True

    def _read(self, scale: Tensor) -> None:
        torch.reciprocal(scale.detach().reshape(()), out=self.inv_scale)
        self._seen = scale, *_version(scale)

    def offer(self) -> Tensor | None:
        """A found_inf of 0 for the gradients of an optimizer, or None: there is one for each step,
        and an attempt that failed may have written it."""
        if self._taken:
            return None
        self._taken = True
        return self.found_inf

    def settle(self, offered: Tensor | None, found_infs: Mapping[Any, Tensor] | None) -> None:
        """After an offer: whether it is among the results."""
        if offered is not None:
            self._taken = any(found is offered for found in (found_infs or {}).values())

    def close_step(
        self, scale: Tensor, found_infs: Iterable[dict[Any, Tensor]], ready: bool
    ) -> None:
        """After an update. What has been found stays in ``found_infs``; with ``ready`` the update
        has made the rest ready itself."""
        if not ready:
            self.last_found_inf.copy_(self.found_inf)
            self.found_inf.zero_()
            self._read(scale)
        self._seen, self._taken = (scale, *_version(scale)), False
        for found in found_infs:
            for device, flag in found.items():
                if flag is self.found_inf:
                    found[device] = self.last_found_inf


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
