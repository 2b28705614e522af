"""Record a program's calls of the fake CUDA runtime, and set the order of operations."""

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
        all: pairs of kind and text. The text of a "launch" is the kernel or torch's operator; of a
            "graph", the number of its operations; of a "copy", bytes and kinds of memory. The text
            of a "memset" or "malloc" is its bytes; of a "host", the host function; of a "query" or
            "wait", the function called.
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
    """Run operations as issued ("now"), at the host's waits ("late") or at random (a seed)."""
    runtime, before = ctypes.CDLL(None), os.environ["FAKE_CUDA_ORDER"]
    runtime.fake_cuda_set_order(order.encode())
    try:
        yield
    finally:
        runtime.fake_cuda_set_order(before.encode())


@contextmanager
def recorded() -> Iterator[Calls]:
    """Record the calls of a region. Regions do not nest."""
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
