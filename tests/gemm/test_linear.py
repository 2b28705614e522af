"""Test amp_ext::linear: act(x @ weight.T + bias) for inputs of any number of dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import ops
from cases import (
    FLOATS,
    KINDS,
    OPERANDS,
    PAIRS,
    assert_equal,
    assert_same,
    integers,
    normal,
    unwritten,
)
from executors import Executor, against_oracle, every_executor
from gemm_cases import cast, doubles

FP16, BF16, FP32, FP64 = FLOATS
SHAPES = [(7,), (1, 7), (5, 7), (3, 5, 7), (2, 3, 5, 7), (0, 7), (2, 0, 7), (200, 7)]

every_kind = pytest.mark.parametrize("dtypes", KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_activation = pytest.mark.parametrize("activation", ["none", "relu"])


def rectified(values: Tensor, activation: str) -> Tensor:
    return torch.where(values > 0, values, 0.0) if activation == "relu" else values


@every_executor
@every_shape
@every_activation
def test_values(executor: Executor, shape: tuple[int, ...], activation: str) -> None:
    """Values of integers equal torch's in float64: shape, dtype and every bit."""
    for dtypes, bias_dtype in zip(PAIRS, 2 * (None, *FLOATS), strict=True):
        x = integers(shape, dtypes[0], executor.device)
        weight = integers((9, 7), dtypes[1], executor.device)
        bias = None if bias_dtype is None else integers((9,), bias_dtype, executor.device)
        with unwritten([x, weight, *([] if bias is None else [bias])]):
            actual = executor.ops.linear(x, weight, bias, activation=activation)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert actual.dtype == torch.promote_types(*dtypes)
        assert actual.device.type == executor.device.type
        assert_equal(actual, rectified(exact, activation))


@every_executor
@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (0, 0), (1, 1), (1, 300), (300, 1)], ids=str)
def test_weights_with_short_sides(executor: Executor, sizes: tuple[int, int]) -> None:
    for lead in ((), (5,), (2, 5)):
        x = integers((*lead, sizes[1]), FP16, executor.device)
        weight = integers(sizes, FP32, executor.device)
        bias = integers(sizes[:1], FP32, executor.device)
        exact = x.double() @ weight.double().mT + bias.double()
        assert_equal(executor.ops.linear(x, weight, bias), exact)


@every_executor
@pytest.mark.parametrize("layout", [name for name in OPERANDS if "batch" not in name])
def test_layouts(executor: Executor, layout: str) -> None:
    """Inputs and weights may be views, as of a fused weight or a slice of a sequence."""
    for dtypes in PAIRS:
        x = OPERANDS[layout](integers((6, 5, 40), dtypes[0], executor.device))
        weight = OPERANDS[layout](integers((33, 40), dtypes[1], executor.device))
        rows = integers((6, 33, 2), FP32, executor.device)
        for case in (x, x.transpose(0, 1), x[:, 0], x[2, 1]):
            exact = case.double() @ weight.double().mT + rows[1, :, 1].double()
            assert_equal(executor.ops.linear(case, weight, rows[1, :, 1]), exact)


@against_oracle
@every_kind
@every_activation
def test_equals_gemm(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], activation: str
) -> None:
    """linear gives the same bits as gemm, forward and backward."""
    shapes = {"x": (3, 50, 70), "weight": (33, 70), "bias": (33,)}
    results = []
    leaves = {name: normal(shape, FP32, executor.device) for name, shape in shapes.items()}
    for run in (
        lambda x, weight, bias: ops.linear(x, weight, bias, activation=activation),
        lambda x, w, bias: ops.gemm(x, w, trans_b=True, bias=bias, activation=activation),
    ):
        tensors = list(cast(leaves, (*dtypes, FP32)).values())
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    for mine, expected in zip(*results, strict=True):
        assert_same(mine, expected)


@every_executor
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 7)], ids=str)
@every_activation
def test_derivatives(executor: Executor, shape: tuple[int, ...], activation: str) -> None:
    tensors = [normal(s, FP64, executor.device).requires_grad_() for s in (shape, (3, 7), (3,))]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *t: executor.ops.linear(*t, activation=activation), tensors)
        assert check(lambda *t: executor.ops.linear(*t, activation=activation), tensors[:2])


@every_executor
@every_shape
@every_kind
def test_exact_gradients(
    executor: Executor,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, ...],
    activation: str = "relu",
) -> None:
    """Gradients of integers are exact in the dtype of each tensor, rounded once; an empty batch
    gives zeros.
    """
    shapes = {"x": shape, "weight": (9, 7), "bias": (9,)}
    leaves = {name: integers(s, FP32, executor.device) for name, s in shapes.items()}
    leaves = cast(leaves, (*dtypes, FP32))
    same = doubles(leaves)
    out = executor.ops.linear(**leaves, activation=activation)
    grad = integers(tuple(out.shape), out.dtype, executor.device)
    out.backward(grad)
    exact = F.linear(*same.values())
    (exact.relu() if activation == "relu" else exact).backward(grad.double())
    for leaf, expected in zip(leaves.values(), same.values(), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_equal(leaf.grad, expected.grad)


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
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7)], ids=str)
@every_activation
def test_compiles(executor: Executor, shape: tuple[int, ...], activation: str) -> None:
    shapes = {"x": shape, "weight": (9, 7), "bias": (9,)}
    leaves = {name: normal(s, FP32, executor.device) for name, s in shapes.items()}
    leaves = cast(leaves, (FP16, FP32, FP32))
    torch._dynamo.reset()
    results = []
    for run in (ops.linear, torch.compile(ops.linear, backend="aot_eager", fullgraph=True)):
        out = run(**leaves, activation=activation)
        grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        results.append([out, *grads])
    for mine, expected in zip(*results, strict=True):
        assert_same(mine, expected)


@against_oracle
@pytest.mark.parametrize(
    ("shape", "with_bias", "activation"),
    [((7,), True, "none"), ((2, 3, 5, 7), True, "relu"), ((0, 7), False, "relu")],
    ids=str,
)
def test_opcheck(
    executor: Executor, shape: tuple[int, ...], with_bias: bool, activation: str
) -> None:
    shapes = (shape, (9, 7), (9,)) if with_bias else (shape, (9, 7))
    tensors = [normal(s, FP32, executor.device).requires_grad_() for s in shapes]
    op = torch.ops.amp_ext.linear.default
    torch.library.opcheck(op, tuple(tensors), {"activation": activation})


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
