"""Products with a gelu by cuBLASLt: one launch each, and exact; what it does not take, and takes no
more, is torch's."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import _C, ops, reference, verify
from amp_ext.nn import MLP
from cases import FLOATS, assert_same, normal, spacing
from fake_cuda.recorder import Calls, is_running, recorded

FP16, BF16, FP32, FP64 = FLOATS
M, N, K = 24, 40, 56
FUSED = "cublasLtMatmul"

pytestmark = pytest.mark.parametrize(
    "device", ["cuda"] if torch.cuda.is_available() and _C.cuda_built() else []
)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


@pytest.fixture(autouse=True)
def by_a_library() -> Iterator[None]:
    before = _C.gemm_mode()
    _C.set_gemm_mode("library")
    yield
    _C.set_gemm_mode(before)


@contextmanager
def launched() -> Iterator[Calls]:
    """On a GPU nothing is recorded."""
    if is_running():
        with recorded() as calls:
            yield calls
    else:
        yield Calls()


def launches(calls: Calls) -> list[str]:
    """But for those that fill what is empty, as the tests have torch do."""
    return [name for name in calls.of("launch") if name != "aten::fill_"]


def assert_launches(calls: Calls, *names: str) -> None:
    if is_running():
        assert launches(calls) == [*names]


@contextmanager
def with_fault(function: str) -> Iterator[None]:
    """Of the fake runtime."""
    switch = getattr(ctypes.CDLL(None), function)
    switch(ctypes.c_bool(True))
    try:
        yield
    finally:
        switch(ctypes.c_bool(False))


def operand(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Rows of memory are longer than those of the matrix."""
    lines, length = (columns, rows) if transposed else (rows, columns)
    return normal((lines, length + 8), dtype, torch.device("cuda"))[:, :length]


def assert_rounded_once(actual: Tensor, exact: Tensor, error: Tensor) -> None:
    """Where the exact value may be off by `error` before."""
    exact, error = exact.cpu(), error.cpu()
    allowed = error + spacing(exact.abs() + error, actual.dtype) / 2
    assert ((actual.double().cpu() - exact).abs() <= allowed).all()


def sum_error(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Of a sum of K products in FP32, a bias of 8 at most and some operations more."""
    magnitude = reference.gemm(a.abs(), b.abs(), **options, out_dtype=FP64)
    return (K + 16) * 2.0**-24 * (magnitude + 8)


@every_dtype
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
def test_each_form(device: str, dtype: torch.dtype, trans_a: bool, trans_b: bool) -> None:
    a, b = operand(M, K, dtype, trans_a), operand(K, N, dtype, trans_b)
    bias = normal((N,), dtype, a.device)
    for more, alpha in itertools.product(({}, {"bias": bias}), (1.0, -0.5)):
        options = {"trans_a": trans_a, "trans_b": trans_b, "alpha": alpha, **more}
        exact = reference.gemm(a, b, **options, out_dtype=FP64)
        error = sum_error(a, b, trans_a=trans_a, trans_b=trans_b)
        options["activation"] = "gelu_tanh"
        curved = reference.gemm(a, b, **options, out_dtype=FP64)
        with launched() as calls:
            out = ops.gemm(a, b, **options)
        assert_launches(calls, FUSED)
        with launched() as calls:
            same, aux = ops.gemm_with_aux(a, b, **options)
        assert_launches(calls, FUSED)
        assert_same(same, out)
        assert_rounded_once(out, curved, 2 * error)
        assert_rounded_once(aux, exact, error)


def misfits() -> dict[str, Callable[[], tuple[Tensor, Tensor, dict[str, Any]]]]:
    def of(
        change: Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor, dict[str, Any]]],
    ) -> Callable[[], tuple[Tensor, Tensor, dict[str, Any]]]:
        def make() -> tuple[Tensor, Tensor, dict[str, Any]]:
            a, b = operand(M, K, FP16, False), operand(K, N, FP16, False)
            return change(a, b, {"bias": normal((N,), FP16, a.device), "activation": "gelu_tanh"})

        return make

    return {
        "an FP32 bias": of(lambda a, b, o: (a, b, o | {"bias": o["bias"].float()})),
        "a strided bias": of(lambda a, b, o: (a, b, o | {"bias": o["bias"].repeat(2)[::2]})),
        "an unaligned bias": of(lambda a, b, o: (a, b[:, 1:-7], o | {"bias": o["bias"][1:33]})),
        "an FP32 result": of(lambda a, b, o: (a, b, o | {"out_dtype": FP32})),
        "mixed operands": of(lambda a, b, o: (a, b.to(BF16), o | {"out_dtype": FP16})),
        "an unaligned operand": of(lambda a, b, o: (a[:, 1:], b[1:], o)),
        "an unaligned row": of(lambda a, b, o: (a[:, :-1].contiguous(), b[:-1], o)),
        "an odd result": of(lambda a, b, o: (a, b[:, :-1], o | {"bias": o["bias"][:-1]})),
        "no unit stride": of(lambda a, b, o: (a.repeat(1, 2)[:, ::2], b, o)),
        "an addend": of(lambda a, b, o: (a, b, o | {"c": a.new_ones(M, N)})),
        "a batch": of(lambda a, b, o: (a.expand(2, M, K), b.expand(2, K, N), o)),
        "no product": of(lambda a, b, o: (a, b, o | {"alpha": 0.0})),
        "relu": of(lambda a, b, o: (a, b, o | {"activation": "relu"})),
        "gelu": of(lambda a, b, o: (a, b, o | {"activation": "gelu"})),
    }


@pytest.mark.parametrize("name", misfits())
def test_what_it_does_not_take(device: str, name: str) -> None:
    a, b, options = misfits()[name]()
    before = _C.refused_by_cublaslt()
    with launched() as calls:
        out = ops.gemm(a, b, **options)
    assert FUSED not in calls.of("launch")
    assert _C.refused_by_cublaslt() == before
    exact = reference.gemm(a, b, **(options | {"out_dtype": FP64}))
    assert_rounded_once(out, exact, 2 * sum_error(a, b))


@every_dtype
def test_no_derivative(device: str, dtype: torch.dtype) -> None:
    """At an aux that overflowed, cuBLASLt does not promise 1 and 0."""
    a, b = operand(M, K, dtype, False), operand(K, N, dtype, False)
    aux = normal((M, N), dtype, a.device)
    aux[0], aux[1] = float("inf"), float("-inf")
    with launched() as calls:
        out, sums = ops.gemm_times_derivative(a, b, aux, activation="gelu_tanh")
    assert FUSED not in calls.of("launch")
    assert out.isfinite().all() and sums.isfinite().all()
    assert out[0].any() and not out[1].any()


@pytest.mark.skipif(not is_running(), reason="a GPU's cuBLASLt does as it likes")
def test_without_an_algorithm(device: str) -> None:
    """Torch's ops compute it; that is counted, and known from then on."""
    a, b = operand(M, K, FP16, False), operand(K, 3 * N, FP16, False)
    before = _C.refused_by_cublaslt()
    for _ in range(2):
        with with_fault("fake_cuda_refuse_products"), launched() as calls:
            out, aux = ops.gemm_with_aux(a, b, activation="gelu_tanh")
    assert FUSED not in calls.of("launch")
    assert _C.refused_by_cublaslt() == before + 2
    exact = reference.gemm(a, b, out_dtype=FP64)
    assert_rounded_once(aux, exact, sum_error(a, b))
    assert out.shape == (M, 3 * N)


@every_dtype
def test_other_addresses_of_the_same_sizes(device: str, dtype: torch.dtype) -> None:
    """What is kept of a product holds none of its addresses."""
    a, b = operand(M, K, dtype, False), operand(K, N, dtype, False)
    kept = []
    for shift in range(3):
        bias = normal((N,), dtype, a.device)
        results = ops.gemm_with_aux(a + shift, b, bias=bias, activation="gelu_tanh")
        kept.append((shift, bias, results))
    for shift, bias, (out, aux) in kept:
        shifted, options = a + shift, {"bias": bias, "out_dtype": FP64}
        error = sum_error(shifted, b)
        assert_rounded_once(aux, reference.gemm(shifted, b, **options), error)
        exact = reference.gemm(shifted, b, **options, activation="gelu_tanh")
        assert_rounded_once(out, exact, 2 * error)


def test_a_graph_captures_it(device: str) -> None:
    a, b = operand(M, K, FP16, False), operand(K, N, FP16, False)
    bias = normal((N,), FP16, a.device)
    ops.gemm(a, b, bias=bias, activation="gelu_tanh")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gemm(a, b, bias=bias, activation="gelu_tanh")
    a.normal_()
    bias.normal_()
    graph.replay()
    assert_same(out, ops.gemm(a, b, bias=bias, activation="gelu_tanh"))


@pytest.mark.skipif(not is_running(), reason="its first use is in a process of its own")
def test_a_capture_before_its_first_use(device: str) -> None:
    """Captures torch's ops: it is not known what creating a handle does to a capture."""
    program = """if True:
        import torch
        from amp_ext import ops
        a, b = torch.ones(8, 16).half().cuda(), torch.ones(16, 8).half().cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.gemm(a, b, activation="gelu_tanh")
        a.fill_(2)
        graph.replay()
        print(out.unique().item())"""
    command = [sys.executable, "-c", program]
    variables = {**os.environ, "AMP_EXT_GEMM": "library", "AMP_EXT_VERIFY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert (done.returncode, done.stdout) == (0, "32.0\n"), done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_of_two_devices(device: str) -> None:
    for index in (0, 1, 0):
        a = torch.ones(8, 16, device=f"cuda:{index}", dtype=FP16)
        with launched() as calls:
            out = ops.gemm(a, a, trans_b=True, activation="gelu_tanh")
        assert_launches(calls, FUSED)
        assert out.unique().tolist() == [16.0]


@pytest.mark.parametrize("family", ["gemm_f16", "gemm_bf16"])
def test_verification(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and finds a tanh with an error of 2**-12, as the instruction for it has."""
    monkeypatch.setattr(verify, "_remember", lambda *result: None)
    assert verify.verify_family("cublaslt", family, "cuda:0").failure == ""
    if is_running():
        with with_fault("fake_cuda_round_tanh"):
            failure = verify.verify_family("cublaslt", family, "cuda:0").failure
            assert failure.startswith("gemm, gelu, layout NN: element")


@pytest.mark.skipif(not is_running(), reason="a GPU's cuBLASLt does as it likes")
def test_verification_without_an_algorithm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's ops pass it, which says nothing of cuBLASLt."""
    kept: list[Any] = []
    monkeypatch.setattr(verify, "_unusable", {})
    monkeypatch.setattr(verify, "_remember", lambda *result: kept.append(result))
    with with_fault("fake_cuda_refuse_products"):
        assert verify.verify_family("cublaslt", "gemm_f16", "cuda:0") is None
    assert not kept
    (reason,) = verify._unusable.values()
    assert reason == "cuBLASLt did not compute all of the cases"


def test_a_verification_is_of_one_version(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = verify._identity("cublaslt", "cuda:0")
    assert before["cublaslt"] == _C.cublaslt_version() > 0
    monkeypatch.setattr(_C, "cublaslt_version", lambda: 1)
    after = verify._identity.__wrapped__("cublaslt", "cuda:0")
    assert after == before | {"cublaslt": 1}


@pytest.mark.skipif(not is_running(), reason="launches are counted by the fake runtime")
@pytest.mark.parametrize(
    ("activation", "forward", "backward"), [("gelu_tanh", 2, 12), ("gelu", 6, 12), ("relu", 3, 11)]
)
def test_launches_of_a_step_of_an_mlp(
    device: str, activation: str, forward: int, backward: int
) -> None:
    layer = MLP(K, N, M, device=device, dtype=FP16, activation=activation)
    x = normal((16, K), FP16, torch.device(device)).requires_grad_()
    grad = normal((16, M), FP16, torch.device(device))
    layer(x).backward(grad)
    layer.zero_grad()
    x.grad = None
    with recorded() as first:
        out = layer(x)
    with recorded() as second:
        out.backward(grad)
    assert (len(launches(first)), len(launches(second))) == (forward, backward)
