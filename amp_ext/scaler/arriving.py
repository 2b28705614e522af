"""Copy numbers from the device to the host."""

import torch
from torch import Tensor


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
