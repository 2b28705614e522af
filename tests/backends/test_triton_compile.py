"""Test torch.compile with the Triton backend: no graph break, the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_ext
from amp_ext import _triton, ops

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(_triton.triton_version() is None, reason="Triton is not installed"),
]
FP16, BF16 = torch.float16, torch.bfloat16


def block(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return ops.linear(ops.linear(x, weight1, bias1, activation="gelu"), weight2, bias2)


def parameters(**options: Any) -> list[Tensor]:
    """Return the parameters of a block 16-32-8, and its input."""
    shapes = ((4, 16), (32, 16), (32,), (8, 32), (8,))
    return [torch.randn(shape, **options) for shape in shapes]


def keeping(ops: list[Any]) -> Callable[..., Any]:
    """Return a compiler that runs the graph unchanged and records its ops."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ops.extend(node.target for node in graph.graph.nodes)
        return torch._dynamo.backends.debugging.boxed_nop(graph, inputs)

    return compiler


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_fake_tensors_of_a_gpu_are_traced_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    amp_ext.set_backend("triton")
    seen: list[Any] = []
    program = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keeping(seen)))
    with FakeTensorMode():
        result = program(*parameters(device="cuda", dtype=dtype))
    assert (result.shape, result.dtype, result.device.type) == ((4, 8), dtype, "cuda")
    assert seen.count(torch.ops.amp_ext.gemm.default) == 2
    assert not [op for op in seen if "aten" in str(op) and "mm" in str(op)]
