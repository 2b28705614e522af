"""Test amp_ext::linear: act(x @ weight.T + bias) for inputs of any number of dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import ops
from cases import (
    FLOATS,
    assert_all_same,
    assert_equal,
    assert_same,
    integers,
    normal,
    unwritten,
)
from executors import Executor, against_oracle, every_executor
from gemm_cases import cast, doubles, every_kind

FP16, BF16, FP32, FP64 = FLOATS
SHAPES = [(7,), (1, 7), (5, 7), (3, 5, 7), (2, 3, 5, 7), (0, 7), (2, 0, 7), (200, 7)]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_executor
@every_kind
@every_shape
def test_values_and_gradients(
    executor: Executor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Values and gradients of integers equal torch's in float64, rounded once to each dtype.

    An empty batch gives gradients of zero.
    """
    shapes = {"x": shape, "weight": (9, 7), "bias": (9,)}
    leaves = {name: integers(s, FP32, executor.device) for name, s in shapes.items()}
    leaves = cast(leaves, (*dtypes, FP32))
    same = doubles(leaves)
    for activation in ("none", "relu"):
        with unwritten(leaves.values()):
            out = executor.ops.linear(**leaves, activation=activation)
        exact = F.linear(*same.values())
        exact = exact.relu() if activation == "relu" else exact
        assert out.dtype == torch.promote_types(*dtypes)
        assert out.device.type == executor.device.type
        assert_equal(out, exact)
        grad = integers(tuple(out.shape), out.dtype, executor.device)
        found = torch.autograd.grad(out, list(leaves.values()), grad)
        wanted = torch.autograd.grad(exact, list(same.values()), grad.double())
        for leaf, actual, expected in zip(leaves.values(), found, wanted, strict=True):
            assert actual.dtype == leaf.dtype
            assert_equal(actual, expected)


@against_oracle
@every_kind
def test_equals_gemm(executor: Executor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """linear gives the same bits as gemm, forward and backward."""
    shapes = {"x": (3, 50, 70), "weight": (33, 70), "bias": (33,)}
    results = []
    leaves = {name: normal(shape, FP32, executor.device) for name, shape in shapes.items()}
    for run in (
        lambda x, weight, bias: ops.linear(x, weight, bias, activation="gelu"),
        lambda x, w, bias: ops.gemm(x, w, trans_b=True, bias=bias, activation="gelu"),
    ):
        tensors = list(cast(leaves, (*dtypes, FP32)).values())
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert_all_same(*results)


class Ops(TorchDispatchMode):
    """Record the names of all called ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@against_oracle
def test_is_one_product_without_copies(executor: Executor) -> None:
    """A batch of matrices takes one product without copies; bias and activation are no ops of their
    own.
    """
    x = normal((3, 50, 70), FP16, executor.device)
    weight, bias = normal((33, 70), FP32, executor.device), normal((33,), FP32, executor.device)
    with Ops() as seen:
        ops.linear(x, weight, bias, activation="relu")
    assert seen.names in (["amp_ext::linear"], ["amp_ext::gemm"])


@against_oracle
def test_dynamic_shapes_compile_once(executor: Executor) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.linear, backend=counter, dynamic=True, fullgraph=True)
    weight = normal((9, 7), FP32, executor.device)
    for rows in (5, 6, 40):
        x = normal((rows, 7), FP16, executor.device)
        assert_same(compiled(x, weight), ops.linear(x, weight))
    assert counter.frame_count == 1
