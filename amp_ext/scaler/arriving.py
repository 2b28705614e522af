"""Numbers of the device's on their way to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Arriving:
    """A copy of a tensor of one element, sent when this is made; reading it waits for the copy, not
    for what the device has been given to do since."""

    def __init__(self, tensor: Tensor) -> None:
        # Elsewhere there is no event to tell when a copy that nothing waits for has arrived.
        self._number = tensor.detach().to("cpu", non_blocking=tensor.is_cuda, copy=True)
        self._sent: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> float:
        if self._sent is not None:
            self._sent.synchronize()
        return self._number.item()


class ArrivingSkip(Arriving):
    """Whether an optimizer's step is to be skipped: the largest of its flags, as they are now."""

    def __init__(self, flags: Sequence[Tensor], largest: Tensor) -> None:
        super().__init__(largest)
        self._flags = [(flag, flag._version) for flag in flags]

    def is_of(self, flags: Sequence[Tensor]) -> bool:
        """Whether the flags are still those that were sent; a version counts what is written."""
        return len(flags) == len(self._flags) and all(
            flag is sent and flag._version == version
            for flag, (sent, version) in zip(flags, self._flags, strict=True)
        )
