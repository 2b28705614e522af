"""Test that the fake CUDA runtime is as asynchronous and strict as it claims."""

import ctypes
from collections.abc import Callable

import pytest
import torch

import programs
from amp_ext import ops
from fake_cuda.recorder import in_order, recorded

pytestmark = pytest.mark.fake_cuda
RUNTIME = ctypes.CDLL(None)


def printed(code: str, **settings: str) -> str:
    """Return the output of a program with other settings."""
    variables = {f"FAKE_CUDA_{name.upper()}": value for name, value in settings.items()}
    return programs.output(f"import torch\n{code}", **variables).strip()


# ---- orders ------------------------------------------------------------------------------------


def early_write() -> float:
    """The host writes pinned memory that a copy reads."""
    host = torch.ones(()).pin_memory()
    device = host.to("cuda", non_blocking=True)
    host.fill_(2)
    return device.item()


def no_wait() -> float:
    x, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(side):
        y = x.clone()
        side.synchronize()
    return y.item()


def branches() -> float:
    """Return the result of two unordered branches of a graph."""
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


@pytest.mark.parametrize(
    ("program", "now", "late"), [(early_write, 1, 2), (no_wait, 1, 0), (branches, 20, 10)]
)
def test_orders_differ_where_nothing_is_waited_for(
    program: Callable[[], object], now: object, late: object
) -> None:
    def result(order: str) -> object:
        with in_order(order):
            return program()

    assert result("now") == now
    assert result("late") == late
    assert {result(str(seed)) for seed in range(20)} == {now, late}


# ---- memory ------------------------------------------------------------------------------------


def test_out_of_memory_for_what_amp_ext_keeps() -> None:
    """An allocation of amp_ext's own memory empties torch's cache when memory is short."""
    grads, found_inf = [torch.ones(4, device="cuda")], torch.zeros((), device="cuda")
    cached = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    pointer, free = ctypes.c_void_p(), torch.cuda.mem_get_info()[0]
    assert RUNTIME.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(free)) == 0
    del cached
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), recorded() as calls:
        norm = ops.grad_norm(grads, found_inf)
    torch.cuda.synchronize()
    assert set(calls.of("wait")) == {"cudaFree"}
    assert norm.item() == 2.0
    assert RUNTIME.cudaFree(pointer) == 0


# ---- programmatic dependent launch -------------------------------------------------------------

EARLY = """
import amp_ext, ctypes
a, found_inf = torch.ones(64, 64, device="cuda", dtype=torch.half), torch.zeros((), device="cuda")
scale, tracker = torch.ones((), device="cuda"), torch.zeros((), device="cuda", dtype=torch.int32)
launches = ctypes.CDLL(None).fake_cuda_early_launches
for call in (
    lambda: amp_ext.ops.check_finite([a], found_inf),
    lambda: amp_ext.ops.update_scale_(scale, tracker, [found_inf], 2.0, 0.5, 9),
    lambda: amp_ext.ops.gemm(a, a),
):
    call()
    before = launches()
    call()
    print(launches() - before, end=" ")
"""


@pytest.mark.parametrize(
    ("capability", "early"), [("90", "1 1 1"), ("80", "0 0 0"), ("100", "1 1 0")]
)
def test_kernel_begins_early_if_its_code_waits(capability: str, early: str) -> None:
    """A kernel begins early if its code waits, as code of compute capability 9.0 does."""
    assert printed(EARLY, capability=capability) == early


# ---- answers of a driver -----------------------------------------------------------------------

LISTS = """
import amp_ext
one, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
for count in (42, 43, 256, 257, 1344, 1345):
    grads = [torch.full((2,), 4.0, device="cuda") for _ in range(count)]
    amp_ext.ops.unscale_(grads, found_inf, one / 2)
    assert all(grad.tolist() == [2.0, 2.0] for grad in grads)
tracker = torch.zeros((), device="cuda", dtype=torch.int32)
for count in (16, 17, 447, 448):
    amp_ext.ops.update_scale_(one, tracker, [found_inf] * count, 2.0, 0.5, 1)
print(one.item())
"""


@pytest.mark.parametrize("driver", ["12000", "12010"])
def test_lists_of_any_length_on_any_driver(driver: str) -> None:
    """Lists of any length run on drivers before CUDA 12.1, with 4 KiB of parameters at most."""
    assert printed(LISTS, driver=driver) == "16.0"


def test_product_in_a_thread_without_a_context() -> None:
    """A product runs in a thread without a context, though tensor maps need one.

    Threads of autograd may have no context.
    """
    code = """
import ctypes, threading
import amp_ext
from fake_cuda.recorder import recorded
a = torch.ones(1024, 1024, device="cuda").half()
def multiply():
    global out
    out = amp_ext.ops.gemm(a, a)
multiply()
del out  # whose memory is the next result's
with recorded() as calls:
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
print(calls.of("launch"))
"""
    assert "gemm_sm90_kernel" in printed(code, capability="90", multiprocessors="16")
