"""CUDA graphs that notice when the gradients they were captured with have moved."""

import struct
import threading
from typing import Any

import torch
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext.report import with_names

_PLACE = struct.Struct("qqq")  # address, bytes and dtype of a gradient; zeros where there is none
_thread = threading.local()  # .capturing: the graph that this thread captures, if it is one of ours


class OnSameGradients:
    """What :class:`CUDAGraph` adds to torch's class."""

    # Optimizer, and where its gradients lay when the scaler read them.
    _captured: tuple[tuple[Optimizer, bytes], ...] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        super().capture_begin(*args, **kwargs)
        self._captured = ()
        _thread.capturing = self

    def capture_end(self) -> None:
        _thread.capturing = None
        self._captured = tuple(
            (optimizer, places)
            for optimizer, places in self._captured
            if _C.gradient_places(optimizer.param_groups) == places
        )
        super().capture_end()

    def replay(self) -> None:
        """As ``torch.cuda.CUDAGraph.replay``.

        Raises:
            RuntimeError: a gradient that the scaler read in the capture has been cleared, or has
                another address, size or dtype now. Nothing has run then.
        """
        for optimizer, places in self._captured:
            now = _C.gradient_places(optimizer.param_groups)
            if now != places:
                raise RuntimeError(f"CUDAGraph.replay: {_difference(optimizer, places, now)}")
        super().replay()


class CUDAGraph(OnSameGradients, torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` that is not replayed on gradients that have moved.

    A graph keeps the addresses of what it was captured with. Where :class:`amp_ext.GradScaler`
    unscales, checks or clips gradients in a captured step, and they are cleared or replaced later
    on, a replay would work on memory that is not theirs any more. Here that is an error::

        graph = amp_ext.CUDAGraph()
        with torch.cuda.graph(graph):
            ...
        graph.replay()

    Gradients that the captured step has itself cleared or replaced are not looked at. The graph
    keeps the optimizers alive.
    """


def note_capture(optimizer: Optimizer) -> None:
    """Tells the graph that this thread captures, if it does, that the scaler reads gradients."""
    graph = getattr(_thread, "capturing", None)
    if graph is not None:
        graph._captured += ((optimizer, _C.gradient_places(optimizer.param_groups)),)


def _difference(optimizer: Optimizer, before: bytes, now: bytes) -> str:
    """What has become of the first gradient that is not where it was."""
    places = [list(_PLACE.iter_unpack(records)) for records in (before, now)]
    if len(before) != len(now):
        counts = [len(records) for records in places]
        return f"the optimizer had {counts[0]} parameters in the capture and has {counts[1]} now"
    names = (name for name, _ in with_names([optimizer]))
    name, then, here = next(
        record for record in zip(names, *places, strict=True) if record[1] != record[2]
    )
    return (
        f"the gradient of {name} was {_text(then)} in the capture and is {_text(here)} now: "
        "capture again, or clear gradients in place, by zero_grad(set_to_none=False)"
    )


def _text(place: tuple[int, int, int]) -> str:
    address, size, dtype = place
    return f"{size} bytes of dtype {dtype} at {address:#x}" if address else "None"
