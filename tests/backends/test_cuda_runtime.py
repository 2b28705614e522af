"""Test the CUDA runtime as the CUDA backend and tests/fake_cuda assume it, here and on a GPU.

The tests call CUDA's functions in one process; no test leaves an error behind.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

RUNTIME = ctypes.CDLL(None)
SMALL = ctypes.c_size_t(1 << 12)
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
SUCCESS, UNSUPPORTED, INVALIDATED = 0, 900, 901


def call(name: str, *arguments: object) -> int:
    """Call a function of CUDA; return its error and clear it."""
    error = getattr(RUNTIME, name)(*arguments)
    RUNTIME.cudaGetLastError()
    return error


def unsafe_calls() -> dict[str, Callable[[], int]]:
    """Return calls of CUDA, with arguments made before the capture."""
    event, freed, made = torch.cuda.Event(), ctypes.c_void_p(), ctypes.c_void_p()
    event.record(torch.cuda.Stream())
    assert call("cudaMalloc", ctypes.byref(freed), SMALL) == SUCCESS
    torch.cuda.synchronize()
    return {
        "malloc": lambda: call("cudaMalloc", ctypes.byref(made), SMALL),
        "free": lambda: call("cudaFree", freed),
        "host_alloc": lambda: call("cudaHostAlloc", ctypes.byref(made), SMALL, 0),
        "event_query": lambda: call("cudaEventQuery", ctypes.c_void_p(event.cuda_event)),
    }


def relaxed(body: Callable[[], int]) -> int:
    """Call a function with its thread relaxed."""
    mode = ctypes.c_int(RELAXED)
    assert call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == SUCCESS
    try:
        return body()
    finally:
        call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@pytest.mark.parametrize(
    ("mode", "is_relaxed", "in_thread", "ends"),
    [
        (GLOBAL, False, True, True),
        (THREAD_LOCAL, False, True, False),
        (GLOBAL, True, True, False),
        (GLOBAL, True, False, False),
    ],
)
@pytest.mark.parametrize("name", ["malloc", "free", "host_alloc", "event_query"])
def test_unsafe_call_ends_a_global_capture(
    name: str, mode: int, is_relaxed: bool, in_thread: bool, ends: bool
) -> None:
    """A call in another thread ends a global capture, unless its thread is relaxed.

    A relaxed thread may thus allocate, send and free the backend's memory during a capture.
    """
    body, graph = unsafe_calls()[name], ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    torch.cuda.synchronize()
    assert call("cudaStreamBeginCapture", stream, mode) == SUCCESS
    run = partial(relaxed, body) if is_relaxed else body
    with ThreadPoolExecutor() as pool:
        error = pool.submit(run).result(60) if in_thread else run()
    captured = call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    if captured == SUCCESS:
        call("cudaGraphDestroy", graph)
    expected = (UNSUPPORTED, INVALIDATED) if ends else (SUCCESS, SUCCESS)
    assert (error, captured) == expected
