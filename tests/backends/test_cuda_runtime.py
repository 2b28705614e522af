"""Test the CUDA runtime as the CUDA backend and tests/fake_cuda assume it, here and on a GPU.

The tests call CUDA's functions in one process; no test leaves an error behind.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

RUNTIME = ctypes.CDLL(None)
RUNTIME.cudaGetErrorString.restype = ctypes.c_char_p
SMALL, LARGE = 1 << 12, 1 << 22
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
SUCCESS, NOT_READY, UNSUPPORTED, INVALIDATED = 0, 600, 900, 901
HOST_TO_DEVICE = 1


def call(name: str, *arguments: object) -> int:
    """Call a function of CUDA; return its error and clear it."""
    error = getattr(RUNTIME, name)(*arguments)
    RUNTIME.cudaGetLastError()
    return error


def stream_of(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def size(bytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(bytes)


def on_device(*shape: int) -> Tensor:
    made = torch.zeros(shape, device="cuda")
    torch.cuda.synchronize()
    return made


def in_a_thread(body: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(body()), daemon=True)
    thread.start()
    thread.join(60)
    return results[0]


def allowing(mode: int, body: Callable[[], int]) -> Callable[[], int]:
    """The body with another mode of its thread."""

    def run() -> int:
        before = ctypes.c_int(mode)
        assert call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(before)) == SUCCESS
        try:
            return body()
        finally:
            call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(before))

    return run


@dataclass
class Capture:
    """The error of a capture, once it has ended."""

    error: int = -1


@contextmanager
def capture(mode: int) -> Iterator[Capture]:
    captured, stream, graph = Capture(), torch.cuda.Stream(), ctypes.c_void_p()
    torch.cuda.synchronize()
    assert call("cudaStreamBeginCapture", stream_of(stream), mode) == SUCCESS
    try:
        yield captured
    finally:
        captured.error = call("cudaStreamEndCapture", stream_of(stream), ctypes.byref(graph))
        if captured.error == SUCCESS:
            call("cudaGraphDestroy", graph)


# ---- calls within captures ---------------------------------------------------------------------


class Calls:
    """Calls of CUDA, with arguments made before the capture."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.Stream())
        self.freed, self.freed_host = ctypes.c_void_p(), ctypes.c_void_p()
        assert call("cudaMalloc", ctypes.byref(self.freed), size(SMALL)) == SUCCESS
        assert call("cudaHostAlloc", ctypes.byref(self.freed_host), size(SMALL), 0) == SUCCESS
        self.made = ctypes.c_void_p()
        torch.cuda.synchronize()

    def malloc(self) -> int:
        return call("cudaMalloc", ctypes.byref(self.made), size(SMALL))

    def free(self) -> int:
        return call("cudaFree", self.freed)

    def host_alloc(self) -> int:
        return call("cudaHostAlloc", ctypes.byref(self.made), size(SMALL), 0)

    def event_query(self) -> int:
        return call("cudaEventQuery", ctypes.c_void_p(self.event.cuda_event))


@pytest.mark.parametrize(
    ("mode", "relaxed", "in_thread", "ends"),
    [
        (GLOBAL, False, True, True),
        (THREAD_LOCAL, False, True, False),
        (GLOBAL, True, True, False),
        (GLOBAL, True, False, False),
    ],
)
@pytest.mark.parametrize("name", ["malloc", "free", "host_alloc", "event_query"])
def test_unsafe_call_ends_a_global_capture(
    name: str, mode: int, relaxed: bool, in_thread: bool, ends: bool
) -> None:
    """A call in another thread ends a global capture, unless its thread is relaxed.

    A relaxed thread may thus allocate, send and free the backend's memory during a capture.
    """
    body = getattr(Calls(), name)
    body = allowing(RELAXED, body) if relaxed else body
    with capture(mode) as captured:
        error = in_a_thread(body) if in_thread else body()
    expected = (UNSUPPORTED, INVALIDATED) if ends else (SUCCESS, SUCCESS)
    assert (error, captured.error) == expected


# ---- copies and events -------------------------------------------------------------------------


def test_pageable_memory_is_read_before_the_call_returns() -> None:
    x, host = on_device(LARGE), torch.ones(LARGE)
    stream = stream_of(torch.cuda.Stream())
    call("cudaMemcpyAsync", address(x), address(host), size(4 * LARGE), HOST_TO_DEVICE, stream)
    host.fill_(2)
    torch.cuda.synchronize()
    assert x.eq(1).all()


def test_event_is_over_once_all_before_it_is() -> None:
    """Pinned memory is reused once an event after its last use has completed."""
    x, pinned = on_device(LARGE), torch.ones(LARGE).pin_memory()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    bytes = size(4 * LARGE)
    raw = stream_of(stream)
    for _ in range(8):
        call("cudaMemcpyAsync", address(x), address(pinned), bytes, HOST_TO_DEVICE, raw)
    event.record(stream)
    while error := call("cudaEventQuery", ctypes.c_void_p(event.cuda_event)):
        assert error == NOT_READY
    pinned.fill_(2)
    torch.cuda.synchronize()
    assert x.eq(1).all()
