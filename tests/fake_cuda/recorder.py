"""Record calls and costs on the fake CUDA runtime, and set the order of what runs."""

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator
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


class Cost(ctypes.Structure):
    """Costs of the kernels of amp_ext: the beginning of cudasim::Statistics.

    Attributes:
        bytes_loaded: by vector loads of 16 bytes.
        bytes_stored: by vector stores.
        bytes_copied: asynchronously: by cp.async, and whole boxes by TMA.
        most_loads: such loads of the thread with most of them, summed over launches.
        kernel: the full name of the last kernel, if one was launched.
    """

    counts = ("instructions", "launches", "blocks", "parameter_bytes", "bytes_loaded")
    counts += ("bytes_stored", "bytes_copied", "most_loads")
    _fields_ = [*((name, ctypes.c_uint64) for name in counts), ("kernel", ctypes.c_char_p)]


def cost(call: Callable[..., object], *arguments: object, **options: object) -> Cost:
    """Return the costs of a call."""
    before = _total_cost()
    call(*arguments, **options)
    after = _total_cost()
    counts = {name: getattr(after, name) - getattr(before, name) for name in Cost.counts}
    return Cost(**counts, kernel=after.kernel if counts["launches"] else b"")


def _total_cost() -> Cost:
    ctypes.CDLL(None).cudaDeviceSynchronize()
    statistics = ctypes.CDLL(os.environ["FAKE_CUDA_KERNELS"]).cudasim_statistics
    statistics.restype = ctypes.POINTER(Cost)
    return Cost.from_buffer_copy(statistics().contents)


@contextmanager
def schedule(seed: int, multiprocessors: int | None = None) -> Iterator[None]:
    """Run kernels in the schedule of a seed, on devices with so many multiprocessors.

    Nine seeds in a row have all pairs of an order of threads and an order of copies.
    """
    runtime = ctypes.CDLL(None)
    # The executor's order of threads is its seed modulo 3; its order of copies is the next digit.
    spread = seed // 9 * 9 + (seed + seed // 3) % 3 * 3 + seed % 3
    runtime.fake_cuda_pin_schedule(ctypes.c_bool(True), ctypes.c_uint64(spread))
    before = None
    if multiprocessors is not None:
        before = runtime.fake_cuda_set_multiprocessors(multiprocessors)
    try:
        yield
    finally:
        runtime.fake_cuda_pin_schedule(ctypes.c_bool(False), ctypes.c_uint64(0))
        if before is not None:
            runtime.fake_cuda_set_multiprocessors(before)
