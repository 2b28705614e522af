"""CUDA graphs that notice when the gradients they were captured with have moved."""

import struct
import threading
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext.report import with_names

_thread = threading.local()  # .graph: the last of ours that this thread began to capture


class Place(NamedTuple):
    """Where the gradient of a parameter lies; zeros where there is none."""

    address: int
    size: int
    dtype: int

    def __str__(self) -> str:
        return f"{self.size} bytes at {self.address:#x}" if self.address else "None"


def _places(records: bytes) -> list[Place]:
    return [Place(*record) for record in struct.iter_unpack("qqq", records)]


class Captured(NamedTuple):
    """An optimizer whose gradients the scaler has read in a capture.

    Attributes:
        optimizer: the capture keeps it alive.
        records: the places of its gradients when the capture ended.
        free: indices of those that the captured step has itself cleared or replaced.
    """

    optimizer: Optimizer
    records: bytes
    free: frozenset[int]

    def difference(self) -> str:
        """What has become of the first gradient that is not where it was; empty if all are."""
        records = _C.gradient_places(self.optimizer.param_groups)
        if records == self.records:
            return ""
        before, now = _places(self.records), _places(records)
        if len(before) != len(now):
            return (
                f"the optimizer had {len(before)} parameters in the capture and has {len(now)} now"
            )
        names = [name for name, _ in with_names([self.optimizer])]
        for index, (name, was, here) in enumerate(zip(names, before, now, strict=True)):
            if was != here and index not in self.free:
                other = "another dtype" if str(was) == str(here) else str(here)
                return (
                    f"the gradient of {name} was {was} in the capture and is {other} now: capture "
                    "again, or clear gradients in place, by zero_grad(set_to_none=False)"
                )
        return ""


class OnSameGradients:
    """What :class:`CUDAGraph` adds to torch's class."""

    _capturing = False
    _captured: tuple[Captured, ...] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        super().capture_begin(*args, **kwargs)
        self._read: dict[int, tuple[Optimizer, bytes]] = {}
        self._captured, self._capturing = (), True
        _thread.graph = self

    def note(self, optimizer: Optimizer) -> None:
        if self._capturing:
            self._read[id(optimizer)] = optimizer, _C.gradient_places(optimizer.param_groups)

    def capture_end(self) -> None:
        self._capturing = False
        super().capture_end()
        captured = []
        for optimizer, read in self._read.values():
            records = _C.gradient_places(optimizer.param_groups)
            pairs = enumerate(zip(_places(read), _places(records)))  # noqa: B905
            free = frozenset(index for index, (was, here) in pairs if was != here)
            captured.append(Captured(optimizer, records, free))
        self._captured, self._read = tuple(captured), {}

    def reset(self) -> None:
        super().reset()
        self._captured = ()

    def replay(self) -> None:
        """As ``torch.cuda.CUDAGraph.replay``.

        Raises:
            RuntimeError: a gradient that the scaler read in the capture has been cleared, or has
                another address, size or dtype now. Nothing has run then.
        """
        for captured in self._captured:
            if difference := captured.difference():
                raise RuntimeError(f"CUDAGraph.replay: {difference}")
        super().replay()
        _C.forget_verdicts()  # no version tells what a graph has written


class CUDAGraph(OnSameGradients, torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` that is not replayed on gradients that have moved.

    A graph keeps the addresses of what it was captured with. Where :class:`amp_ext.GradScaler`
    unscales, checks or clips gradients in a captured step, and they are cleared or replaced later
    on, a replay would work on memory that is not theirs any more. Here that is an error::

        graph = amp_ext.CUDAGraph()
        with torch.cuda.graph(graph):
            ...
        graph.replay()

    A gradient that the captured step has itself cleared or replaced is not looked at. The graph
    keeps the optimizers alive until it is reset.
    """


def note_capture(optimizer: Optimizer) -> None:
    """Tells the graph that this thread captures, if there is one, whose gradients are read."""
    graph = getattr(_thread, "graph", None)
    if graph is not None:
        graph.note(optimizer)
