"""Record the arguments of Triton launches on the fake CUDA runtime without computing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from amp_ext import _triton, ops, verify

pytestmark = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(_triton.triton_version() is None, reason="Triton is not installed"),
]
FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("AMP_EXT_VERIFY", "0")
    amp_ext.set_backend("triton")
    yield
    amp_ext.set_backend(None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Keep all launches: grid, stream, compiled function, its metadata, the kernel's arguments."""
    from triton.backends.nvidia.driver import CudaLauncher

    launches = []
    launch = CudaLauncher.__call__

    def keeping(self: Any, *arguments: Any) -> None:
        launches.append(tuple(arguments[:6]) + tuple(described(x) for x in arguments[9:]))
        launch(self, *arguments)

    monkeypatch.setattr(CudaLauncher, "__call__", keeping)
    return launches


def described(x: Any) -> Any:
    """Return an argument, or "address" for an address."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(x, TensorDescriptor):
        return described(x.base.data_ptr()), x.shape, x.strides, x.block_shape
    is_address = isinstance(x, int) and x > 2**32
    return "address" if is_address else x


def on_gpu(*shape: int, dtype: torch.dtype = FP16) -> Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


@pytest.fixture
def calls() -> list[Callable[[], object]]:
    grads = [on_gpu(100, dtype=torch.float32) for _ in range(2)]
    output = on_gpu(100)
    found_inf, one = on_gpu(dtype=torch.float32), torch.ones((), device="cuda")
    tracker = on_gpu(dtype=torch.int32)
    a, odd = on_gpu(64, 64), on_gpu(64, 65)[:, 1:]
    bias, wide = on_gpu(64), on_gpu(64, dtype=torch.float32)
    return [
        lambda: ops.check_finite(grads, found_inf),
        lambda: ops.unscale_(grads, found_inf, one),
        lambda: ops.cast_([output], grads[:1]),
        lambda: ops.grad_norm(grads, found_inf),
        lambda: ops.update_scale_(one, tracker, [found_inf], 2.0, 0.5, 2000),
        lambda: ops.gemm(a, a),
        lambda: ops.gemm(odd, a),
        lambda: ops.gemm(a, a, alpha=2.0),
        lambda: ops.gemm(a, a, bias=bias),
        lambda: ops.gemm(a, a, bias=wide),
        lambda: ops.gemm(a, a, c=a),
        lambda: ops.gemm(a.bfloat16(), a.bfloat16()),
    ]


def test_triton_kernels_run_in_place_of_wrong_cuda_kernels(
    calls: list[Callable[[], object]], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op on lists has its kernel of Triton, or an error if that is wrong too."""
    amp_ext.set_backend(None)
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    for right in ("triton", ""):
        monkeypatch.setattr(verify, "may_run", lambda backend, *_, right=right: backend == right)
        with ThreadPoolExecutor(1) as thread:  # a new thread knows of no verification
            errors = [thread.submit(call).exception() for call in calls[:5]]
        assert len(launched) == 5
        assert [error is None for error in errors] == [right == "triton"] * 5
    assert all("no kernels of this op have passed" in str(error) for error in errors)


def test_later_launches_get_what_the_first_one_got_cuda(
    calls: list[Callable[[], object]],
    launched: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call in calls:
        call()
    first = launched.copy()
    launched.clear()
    assert len(first) == len(calls)
    monkeypatch.delattr("triton.runtime.jit.JITFunction.run")  # Triton's own look-up
    for call in calls:
        call()
    assert launched == first


def test_each_device_loads_its_own_cuda(launched: list[tuple[Any, ...]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x = torch.ones(64, 64, device=device, dtype=FP16)
        ops.check_finite([x], x.new_zeros(1, dtype=torch.float32))
        ops.gemm(x, x)
    functions = [launch[4] for launch in launched]
    assert functions[:2] == functions[4:]
    assert not set(functions[:2]) & set(functions[2:4])


def test_a_stream_of_its_own_cuda(
    calls: list[Callable[[], object]], launched: list[tuple[Any, ...]]
) -> None:
    usual, stream = torch.cuda.current_stream().cuda_stream, torch.cuda.Stream()
    for call in (calls[0], calls[5]):  # of lists, of matrices
        call()
        with torch.cuda.stream(stream):
            call()
    assert [launch[3] for launch in launched] == 2 * [usual, stream.cuda_stream]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keep the arguments of later launches of products, by the names of parameters."""
    from amp_ext.triton_kernels.gemm import gemm

    found = []

    def launch(compiled: Any, programs: int, stream: int, arguments: list[Any]) -> None:
        found.append(dict(zip(compiled.src.fn.arg_names, arguments, strict=True)))

    monkeypatch.setattr(gemm, "launch", launch)
    return found


def test_products_of_other_tensors_cuda(known: list[dict[str, Any]]) -> None:
    """Later products have their own tensors; a bias with holes is copied."""
    ops.gemm(on_gpu(64, 64), on_gpu(64, 64), bias=on_gpu(64))
    a, b, bias = on_gpu(64, 64), on_gpu(64, 64), on_gpu(128)
    given = {"a": a, "b": b, "bias": bias, "out": ops.gemm(a, b, bias=bias[:64])}
    assert all(known[-1][name] == tensor.data_ptr() for name, tensor in given.items())
    ops.gemm(a, b, bias=bias[::2])
    assert known[-1]["bias"] not in (0, bias.data_ptr())


def test_splits_have_memory_cuda(known: list[dict[str, Any]]) -> None:
    a, b = on_gpu(64, 4096), on_gpu(4096, 64)
    for _ in range(2):
        ops.gemm(a, b)
    (product,) = known
    assert product["splits"] > 1
    assert product["scratch"] and product["tickets"]


def test_hooks_see_every_launch_cuda(
    calls: list[Callable[[], object]], launched: list[tuple[Any, ...]]
) -> None:
    from triton import knobs

    entered: list[str] = []
    left: list[str] = []

    def enter(metadata: Any) -> None:
        entered.append(metadata.get()["name"])

    def leave(metadata: Any) -> None:
        left.append(metadata.get()["name"])
        assert left == entered

    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        for call in calls:
            call()
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    assert len(left) == len(launched) == len(calls)
    assert all(name.endswith("_kernel") for name in left)


def test_a_product_that_is_first_seen_in_a_capture_cuda(launched: list[tuple[Any, ...]]) -> None:
    """torch's library computes a product first seen in a capture; no module is loaded."""
    known, new = on_gpu(48, 48), torch.full((40, 56), 2.0, device="cuda", dtype=FP16)
    ops.gemm(known, known)
    launched.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = ops.gemm(new, new, trans_b=True)
        ops.gemm(known, known)
    graph.replay()
    assert len(launched) == 1
    assert (product == 4 * 56).all()
