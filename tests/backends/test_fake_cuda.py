"""The fake CUDA runtime itself: that it is as asynchronous, and as strict, as it says."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from amp_ext import ops
from fake_cuda.recorder import in_order, is_running, recorded

if not is_running():
    pytest.skip("these are for tests/fake_cuda/run.py", allow_module_level=True)

LARGE = 1 << 20
RUNTIME = ctypes.CDLL(None)
RUNTIME.cudaGetErrorString.restype = ctypes.c_char_p


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, with other settings."""
    variables = {f"FAKE_CUDA_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-c", f"import torch\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def printed(code: str, **settings: str) -> str:
    done = run(code, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- orders ------------------------------------------------------------------------------------


def early_write() -> float:
    """The host writes pinned memory that a copy reads."""
    host = torch.ones(()).pin_memory()
    device = host.to("cuda", non_blocking=True)
    host.fill_(2)
    return device.item()


def no_wait(waits: bool = False) -> float:
    x, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.clone()
        side.synchronize()
    return y.item()


def branches() -> float:
    """Of a graph, that nothing orders."""
    x, graph, side = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        x.fill_(1)
        with torch.cuda.stream(side):
            x.fill_(2)
        torch.cuda.current_stream().wait_stream(side)
        x.mul_(10)
    graph.replay()
    return x.item()


def pinned_again() -> bool:
    """Whether torch reuses pinned memory that a copy may still read."""
    host = torch.ones(LARGE).pin_memory()
    first = host.data_ptr()
    device = host.to("cuda", non_blocking=True)
    del host
    again = torch.ones(LARGE).pin_memory().data_ptr() == first
    assert device.min() == 1
    return again


@pytest.mark.parametrize(
    ("program", "now", "late"),
    [(early_write, 1, 2), (no_wait, 1, 0), (branches, 20, 10), (pinned_again, True, False)],
)
def test_orders_differ_where_nothing_is_waited_for(
    program: Callable[[], object], now: object, late: object
) -> None:
    with in_order("now"):
        assert program() == now
    with in_order("late"):
        assert program() == late
    seen = set()
    for seed in range(20):
        with in_order(str(seed)):
            seen.add(program())
    assert seen == {now, late}


@pytest.mark.parametrize("order", ["now", "late", *map(str, range(20))])
def test_events_order_streams(order: str) -> None:
    with in_order(order):
        assert no_wait(waits=True) == 1


def test_random_numbers_are_of_the_time_of_the_call() -> None:
    """Not of the time at which the operation runs."""
    torch.cuda.manual_seed(5)
    first = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(5)
    second = torch.randn(4, device="cuda")
    assert first.equal(second)
    assert not torch.randn(4, device="cuda").equal(second)


# ---- memory ------------------------------------------------------------------------------------

READ = "import ctypes\nx = torch.ones(4, device='cuda')\ntorch.cuda.synchronize()\n"


def test_host_that_reads_device_memory() -> None:
    code = READ + "ctypes.string_at(x.data_ptr(), 4)"
    assert run(code, guarded="0").returncode == 0
    done = run(code, guarded="1")
    assert done.returncode == -11
    assert "fake cuda: the host touched device memory at 0x" in done.stderr


def test_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 8\.00 GiB"):
        torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum() == 3


def test_out_of_memory_for_what_amp_ext_keeps() -> None:
    """torch's cache is emptied, as for torch's own memory."""
    grads = [torch.ones(1, device="cuda") for _ in range(3000)]
    found_inf, half = torch.zeros((), device="cuda"), torch.tensor(0.5, device="cuda")
    cached = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    pointer, free = ctypes.c_void_p(), torch.cuda.mem_get_info()[0]
    assert RUNTIME.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(free)) == 0
    del cached
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), recorded() as calls:
        ops.unscale_(grads, found_inf, half)
    torch.cuda.synchronize()
    assert set(calls.of("wait")) == {"cudaFree"}
    assert torch.cat(grads).unique().tolist() == [0.5]
    assert RUNTIME.cudaFree(pointer) == 0


def test_memory_of_another_device() -> None:
    code = "x = torch.ones(4, device='cuda:0')\nprint(x.to('cuda:1').add(1).to('cuda:0').tolist())"
    assert printed(code, devices="2") == "[2.0, 2.0, 2.0, 2.0]"


# ---- captures ----------------------------------------------------------------------------------


def capture(body: Callable[[], object], mode: str = "global") -> str:
    """Return the error that ends it, in the body or behind it; empty if there is none."""
    errors = []
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            try:
                body()
            except RuntimeError as error:
                errors.append(str(error))
    except RuntimeError as error:
        errors.append(str(error))
    return errors[0] if errors else ""


def in_a_thread(body: Callable[[], object]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def unjoined() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(3, device="cuda").add_(1)


FORBIDDEN = {
    "synchronize": (torch.cuda.synchronize, "cudaDeviceSynchronize while a stream is captured"),
    "item": (lambda: torch.ones((), device="cuda").item(), "on a stream that is captured"),
    "unjoined stream": (unjoined, "a captured stream was not joined"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_captures_forbid(name: str) -> None:
    body, text = FORBIDDEN[name]
    assert text in capture(body)
    assert torch.ones(3, device="cuda").sum() == 3


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_thread_allocates_during_a_capture(mode: str) -> None:
    """In mode global that ends the capture."""
    errors = []

    def allocate() -> None:
        pointer = ctypes.c_void_p()
        errors.append(RUNTIME.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(LARGE)))

    def body() -> None:
        in_a_thread(allocate)
        torch.ones(3, device="cuda").add_(1)

    error = capture(body, mode)
    assert errors == [900 if mode == "global" else 0]
    assert ("invalid capture" in error) == (mode == "global")


# ---- launches ----------------------------------------------------------------------------------


class Dim(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("cluster", Dim),
        ("rest", ctypes.c_char * 52),
    ]


class Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", Dim),
        ("block", Dim),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


CLUSTER = 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid": Dim(0, 1, 1)}, "its grid"),
        ({"grid": Dim(1, 65536, 1)}, "its grid"),
        ({"block": Dim(1025, 1, 1)}, "its block"),
        ({"shared": (48 << 10) + 1}, "more shared memory than it may have"),
        ({"attribute": Attribute(CLUSTER, 0, Dim(9, 1, 1))}, "the size of its cluster"),
        ({"attribute": Attribute(CLUSTER, 0, Dim(3, 1, 1))}, "a grid that is no whole clusters"),
        ({"attribute": Attribute(CLUSTER + 1, 0)}, "an unknown attribute"),
        ({}, "nothing can run no_kernel"),
    ],
)
def test_launches_are_checked(options: dict[str, object], text: str) -> None:
    """Of a kernel that is not ours, so that at last it is that nothing runs it."""
    if "cluster" in text and torch.cuda.get_device_capability() < (9, 0):
        text = "a cluster before compute capability 9.0"
    pointer, symbol = ctypes.c_char_p(b"the host's function"), ctypes.c_char_p(b"_Z9no_kernelv")
    RUNTIME.__cudaRegisterFunction(None, pointer, None, symbol, -1, *[None] * 5)
    attribute = options.get("attribute")
    configuration = Configuration(
        options.get("grid", Dim(4, 1, 1)),
        options.get("block", Dim(32, 1, 1)),
        options.get("shared", 0),
        None,
        ctypes.pointer(attribute) if attribute else None,
        1 if attribute else 0,
    )
    error = RUNTIME.cudaLaunchKernelExC(ctypes.byref(configuration), pointer, None)
    assert error != 0
    assert text in RUNTIME.cudaGetErrorString(error).decode()
    RUNTIME.cudaGetLastError()


def test_call_that_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    error = RUNTIME.cudaGraphAddKernelNode()
    assert b"cudaGraphAddKernelNode is missing" in RUNTIME.cudaGetErrorString(error)
    assert "fake cuda: cudaGraphAddKernelNode is missing" in capfd.readouterr().err
    RUNTIME.cudaGetLastError()


# ---- the recorder ------------------------------------------------------------------------------


def test_recorder() -> None:
    grads = [torch.ones(5, device="cuda") for _ in range(3)]
    found_inf, factor = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    found_inf.item()  # allocates pinned memory, the first time
    with recorded() as calls:
        ops.unscale_(grads, found_inf, factor)
        grads[0].add_(1)
        found_inf.item()
    kernel, torchs = calls.of("launch")
    assert "unscale_kernel" in kernel
    assert torchs == "aten::add_"
    assert calls.counts() == {"launch": 2, "copy": 1, "wait": 1}
    assert calls.of("copy")[0].startswith("4 bytes from device to")
