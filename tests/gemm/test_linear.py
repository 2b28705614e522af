"""Test amp_ext::linear, for inputs of any number of dimensions, and amp_ext.nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import amp_ext
from amp_ext import ops
from amp_ext.nn import Linear
from autocast_cases import Seen
from cases import FLOATS, assert_all_same, assert_same, normal, unwritten
from executors import Executor, against_oracle
from gemm_cases import cast, every_kind

FP16, BF16, FP32, FP64 = FLOATS
SHAPES = [(7,), (1, 7), (5, 7), (3, 5, 7), (2, 3, 5, 7), (0, 7), (2, 0, 7), (200, 7)]


@against_oracle
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_gemm(
    executor: Executor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """linear gives the same bits as gemm, forward and backward, by one product without copies."""
    shapes = {"x": shape, "weight": (9, 7), "bias": (9,)}
    results = []
    leaves = {name: normal(shape, FP32, executor.device) for name, shape in shapes.items()}
    for run in (
        ops.linear,
        lambda x, w, bias: ops.gemm(torch.atleast_2d(x), w, trans_b=True, bias=bias).view(
            *shape[:-1], 9
        ),
    ):
        tensors = list(cast(leaves, (*dtypes, FP32)).values())
        with unwritten(tensors), Seen() as seen:
            out = run(*tensors)
        assert run is not ops.linear or len(shape) == 1 or len(seen.ops) == 1
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert_all_same(*results)


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
        jacobian = torch.func.jacrev(lambda w: op(x, w).sigmoid())
        gradient = torch.func.grad(lambda w: op(x, w).sigmoid().square().sum())
        return [f(parameter) for f in (gradient, jacobian, torch.func.jacrev(jacobian))]

    expected = transformed(torch.nn.functional.linear, weight)
    for parameter in (weight, nn.Parameter(weight)):
        torch.testing.assert_close(transformed(ops.linear, parameter), expected)


# ---- amp_ext.nn.Linear ---------------------------------------------------------------------------


def test_parameters_are_torchs() -> None:
    """The layer is a torch.nn.Linear, with its initial values and checkpoints."""
    for bias in (True, False):
        layers = []
        for layer in (Linear, nn.Linear):
            torch.manual_seed(0)
            layers.append(layer(5, 3, bias))
        assert isinstance(layers[0], nn.Linear)
        states = [layer.state_dict() for layer in layers]
        assert [list(state) for state in states] == 2 * [["weight", "bias"][: 1 + bias]]
        assert_all_same(*(state.values() for state in states))


@against_oracle
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
def test_layer_under_autocast(
    executor: Executor, region: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    """Products are FP16, and gradients FP32: FP16 cannot hold sums of 2**18 rows."""
    layer = Linear(7, 6, device=executor.device)
    nn.init.constant_(layer.weight, 2.0**8)
    x = torch.full(shape, 2.0**9, device=executor.device).requires_grad_()
    with region(executor.device.type, dtype=FP16), Seen() as seen:
        out = layer(x)
    assert (out.dtype, out.shape) == (FP16, (*shape[:-1], 6))
    assert seen.gemms == 1
    out.backward(torch.full_like(out, 2.0**9))
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.dtype == FP32
    assert layer.weight.grad.unique().tolist() == [out.numel() // 6 * 2.0**18]
    assert x.grad.unique().tolist() == [6 * 2.0**17]
