"""Test amp_ext::linear: x @ weight.T + bias for inputs of any number of dimensions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from amp_ext import ops
from autocast_cases import Seen
from cases import FLOATS, assert_all_same, assert_same, normal, unwritten
from executors import Executor, against_oracle
from gemm_cases import cast, every_kind

FP16, BF16, FP32, FP64 = FLOATS
SHAPES = [(7,), (1, 7), (5, 7), (3, 5, 7), (2, 3, 5, 7), (0, 7), (2, 0, 7), (200, 7)]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@against_oracle
@every_kind
@every_shape
def test_equals_gemm(
    executor: Executor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """linear gives the same bits as gemm, forward and backward."""
    shapes = {"x": shape, "weight": (9, 7), "bias": (9,)}
    results = []
    leaves = {name: normal(shape, FP32, executor.device) for name, shape in shapes.items()}
    for run in (
        lambda x, weight, bias: ops.linear(x, weight, bias),
        lambda x, w, bias: ops.gemm(torch.atleast_2d(x), w, trans_b=True, bias=bias).view(
            *shape[:-1], 9
        ),
    ):
        tensors = list(cast(leaves, (*dtypes, FP32)).values())
        with unwritten(tensors):
            out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert_all_same(*results)


@against_oracle
def test_is_one_product_without_copies(executor: Executor) -> None:
    """A batch of matrices takes one product, with bias, and no copies."""
    x = normal((3, 50, 70), FP16, executor.device)
    weight, bias = normal((33, 70), FP32, executor.device), normal((33,), FP32, executor.device)
    with Seen() as seen:
        ops.linear(x, weight, bias)
    assert seen.names in (["linear"], ["gemm"])
    assert len(seen.ops) == 1


@against_oracle
def test_dynamic_shapes_compile_once(executor: Executor) -> None:
    """A dynamic program of linear is compiled once for any number of rows."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.linear, backend=counter, dynamic=True, fullgraph=True)
    weight = normal((9, 7), FP32, executor.device)
    for rows in (5, 6, 40):
        x = normal((rows, 7), FP16, executor.device)
        assert_same(compiled(x, weight), ops.linear(x, weight))
    assert counter.frame_count == 1


@against_oracle
def test_transforms_of_functions(executor: Executor) -> None:
    """Function transforms work over parameters that require gradients, and over each other."""
    x, weight = (normal((3, 3), FP64, executor.device) for _ in range(2))

    def transformed(op: Callable[..., Tensor], parameter: Tensor) -> list[Tensor]:
        def function(w: Tensor) -> Tensor:
            return op(x, w).sigmoid()

        jacobian = torch.func.jacrev(function)
        gradient = torch.func.grad(lambda w: function(w).square().sum())
        return [f(parameter) for f in (gradient, jacobian, torch.func.jacrev(jacobian))]

    expected = transformed(torch.nn.functional.linear, weight)
    for parameter in (weight, torch.nn.Parameter(weight)):
        torch.testing.assert_close(transformed(ops.linear, parameter), expected)
