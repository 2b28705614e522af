"""Numbers of the device's on their way to the host."""

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
