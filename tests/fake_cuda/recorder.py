"""The fake CUDA runtime of this process: what a program asks of it, and the order of operations."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Calls:
    """Calls of the runtime, once the region that records them has been left.

    Attributes:
        all: kind and text of each: ("launch", the kernel or torch's operator), ("graph", the number
            of its operations), ("copy", bytes and kinds of memory), ("memset", bytes), ("malloc",
            bytes), ("host", a function of the host on a stream), ("query", the function that asks)
            or ("wait", the function in which the host waits).
    """

    all: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: str) -> list[str]:
        """Return the texts of one kind."""
        return [text for other, text in self.all if other == kind]

    def counts(self) -> Counter[str]:
        """Return how many there are of each kind."""
        return Counter(kind for kind, _ in self.all)


def is_running() -> bool:
    """Whether this process runs on the fake CUDA runtime."""
    return "FAKE_CUDA_KERNELS" in os.environ


@contextmanager
def in_order(order: str) -> Iterator[None]:
    """Have operations run as they are issued ("now"), when the host waits for them ("late") or at
    random by a seed ("7")."""
    runtime, before = ctypes.CDLL(None), os.environ["FAKE_CUDA_ORDER"]
    runtime.fake_cuda_set_order(order.encode())
    try:
        yield
    finally:
        runtime.fake_cuda_set_order(before.encode())


@contextmanager
def no_pinned_memory() -> Iterator[None]:
    """Have every allocation of pinned memory fail."""
    runtime = ctypes.CDLL(None)
    runtime.fake_cuda_refuse_pinned(ctypes.c_bool(True))
    try:
        yield
    finally:
        runtime.fake_cuda_refuse_pinned(ctypes.c_bool(False))


@contextmanager
def recorded() -> Iterator[Calls]:
    """Record the calls of a region, which is in no other such region."""
    runtime = ctypes.CDLL(None)
    runtime.fake_cuda_recorded.restype = ctypes.c_char_p
    calls = Calls()
    runtime.fake_cuda_record(ctypes.c_bool(True))
    try:
        yield calls
    finally:
        runtime.fake_cuda_record(ctypes.c_bool(False))
        lines = runtime.fake_cuda_recorded().decode().splitlines()
        calls.all += [tuple(line.split("\t", 1)) for line in lines]
