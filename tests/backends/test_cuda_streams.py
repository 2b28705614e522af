"""Test the CUDA backend's state of a stream: tables of long lists, tickets and staged copies.

The tests use several streams, threads, devices and graphs. The fake CUDA runtime of tests/fake_cuda
varies the order of operations as a GPU may.
"""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from executors import EXECUTORS

CUDA = EXECUTORS[2]
DEVICES = [] if CUDA.missing else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
LONG = 3000  # tensors: too many for a kernel's parameters
WIDE = (64, 128)  # rows and columns of a product with more tickets
LIMIT = 60  # seconds that a thread waits for another
FP16, FP32 = torch.float16, torch.float32

on_cuda = pytest.mark.parametrize("device", DEVICES[:1], ids=["cuda"] if DEVICES else [])
on_every_device = pytest.mark.parametrize("device", DEVICES, ids=[f"{d}-cuda" for d in DEVICES])


class Grads:
    """A list of gradients with the values 0, 1, 2 and so on, times all factors so far."""

    def __init__(self, device: str, count: int = LONG) -> None:
        self.list = list(torch.arange(float(count), device=device)[:, None].expand(-1, 3).clone())
        self.found_inf = torch.zeros((), device=device)
        self.half = torch.tensor(0.5, device=device)

    def unscale(self) -> None:
        ops.unscale_(self.list, self.found_inf, self.half)

    def check(self, times: int) -> None:
        values = torch.stack(self.list).cpu()
        assert values.equal(torch.arange(float(len(values)))[:, None].expand(-1, 3) / 2**times)


class Product:
    """A product of few tiles, each in several splits with a ticket."""

    def __init__(self, device: str, rows: int = 16, columns: int = 64) -> None:
        self.a = torch.randint(-3, 4, (rows, 2048), device=device).to(FP16)
        self.b = torch.randint(-3, 4, (2048, columns), device=device).to(FP16)
        torch.cuda.synchronize()

    def compute(self) -> Tensor:
        return ops.gemm(self.a, self.b, out_dtype=FP32)

    def check(self, result: Tensor) -> None:
        assert result.cpu().equal(self.a.cpu().float() @ self.b.cpu().float())


def captured(body: Callable[[], object], stream: Any = None) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph


@on_every_device
def test_lists_in_turn(device: str) -> None:
    """Launches of long lists keep their tables while the host runs ahead.

    Kernels have their larger shared memory on each device of their launches.
    """
    product = Product(device, 256, 256)
    product.check(product.compute())
    lists = [Grads(device, LONG), Grads(device, LONG), Grads(device, LONG + 500)]
    for _ in range(3):
        for grads in lists:
            grads.unscale()
    for grads in lists:
        grads.check(3)
    assert torch.cuda.current_device() == 0


@on_every_device
def test_two_streams(device: str) -> None:
    lists = [Grads(device), Grads(device)]
    product = Product(device)
    results = []
    streams = [torch.cuda.Stream(device) for _ in lists]
    torch.cuda.synchronize(device)
    for _ in range(3):
        for stream, grads in zip(streams, lists, strict=True):
            with torch.cuda.stream(stream):
                grads.unscale()
                results.append(product.compute())
    torch.cuda.synchronize(device)
    for grads in lists:
        grads.check(3)
    for result in results:
        product.check(result)


@on_cuda
def test_more_tickets_than_ever(device: str) -> None:
    """Tickets are replaced while launches with the old ones may run."""
    products = [Product(device), Product(device, *WIDE)]
    results = [product.compute() for product in products]
    for product, result in zip(products, results, strict=True):
        product.check(result)


@on_cuda
@pytest.mark.parametrize("warm", [False, True])
def test_graph(device: str, warm: bool) -> None:
    """A graph, here of two branches, owns its tables and ticket counters.

    Ops outside the graph do not disturb them.
    """
    grads, others, product = Grads(device), Grads(device), Product(device)
    wide, beside = Product(device, *WIDE), Grads(device)
    norms, results = [], []

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside.unscale()
        grads.unscale()
        norms.append(ops.grad_norm(grads.list, grads.found_inf))
        results.append(product.compute())
        torch.cuda.current_stream().wait_stream(side)

    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        if warm:
            step()
        graph = captured(step, stream)
        gc.collect()
        kept = [torch.full((1 << 17,), 255, dtype=torch.uint8).pin_memory() for _ in range(8)]
        wide.check(wide.compute())  # with more tickets than before
        for _ in range(3):
            others.unscale()
            graph.replay()
            product.check(product.compute())
    torch.cuda.synchronize()
    grads.check(3 + warm)
    beside.check(3 + warm)
    others.check(3)
    product.check(results[-1])
    exact = torch.stack(grads.list).double().norm().item()
    assert norms[-1].item() == pytest.approx(exact, rel=2.0**-20)
    del kept


@on_cuda
@pytest.mark.parametrize("ends", [False, True])
def test_thread_during_a_capture(device: str, ends: bool) -> None:
    """A thread may use a stream for the first time, or end, during a capture."""
    grads, others, stream = Grads(device), Grads(device, 7), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cached = [torch.empty(1 << 18, device=device)]  # torch cannot allocate during the capture

    def work() -> None:
        cached.clear()
        with torch.cuda.stream(stream):
            grads.unscale()
            ops.grad_norm(grads.list, grads.found_inf)

    go, ready = threading.Event(), threading.Event()

    def work_and_wait() -> None:
        work()
        torch.cuda.synchronize()
        ready.set()
        go.wait(LIMIT)

    thread = threading.Thread(target=work_and_wait if ends else work, daemon=True)
    if ends:
        thread.start()
        assert ready.wait(LIMIT)

    def step() -> None:
        if not ends:
            thread.start()
        go.set()
        end = time.monotonic() + LIMIT
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            assert time.monotonic() < end, "a hang"
            time.sleep(0.001)  # join() returns before the thread's memory has been freed
        others.unscale()

    graph = captured(step)
    torch.cuda.synchronize()
    graph.replay()
    grads.check(1)
    others.check(1)
