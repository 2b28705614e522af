"""Test amp_ext.nn.Linear: parameters, autocast and compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.nn import Linear
from autocast_cases import Seen
from cases import assert_same, normal
from executors import Executor, against_oracle

FP16, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_torchs(bias: bool) -> None:
    """The layer is a torch.nn.Linear, with its initial values and checkpoints."""
    torch.manual_seed(0)
    ours = Linear(5, 3, bias)
    torch.manual_seed(0)
    state = nn.Linear(5, 3, bias).state_dict()
    assert isinstance(ours, nn.Linear)
    assert list(ours.state_dict()) == list(state)
    for name, value in ours.state_dict().items():
        assert_same(value, state[name])
    ours.load_state_dict(state)


@against_oracle
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
def test_autocast(executor: Executor, region: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """Products are FP16, and gradients FP32: FP16 cannot hold sums of 2**18 rows."""
    layer = Linear(7, 6, device=executor.device)
    x = torch.full(shape, 2.0**9, device=executor.device).requires_grad_()
    with region(executor.device.type, dtype=FP16), Seen() as seen:
        out = layer(x)
    assert (out.dtype, out.shape) == (FP16, (*shape[:-1], 6))
    assert seen.gemms == 1
    out.backward(torch.full_like(out, 2.0**9))
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.dtype == FP32
    assert layer.weight.grad.unique().tolist() == [out.numel() // 6 * 2.0**18]


@against_oracle
@pytest.mark.parametrize("inside", [True, False])
def test_compiles(executor: Executor, inside: bool) -> None:
    """A compiled layer computes the same, in a region inside or outside of the program."""
    torch._dynamo.reset()
    layer = Linear(7, 6, device=executor.device)
    x = normal((3, 5, 7), FP32, executor.device)

    def step(net: Callable[[Tensor], Tensor]) -> Tensor:
        with amp_ext.autocast(executor.device.type, dtype=FP16):
            return net(x).float().square().sum()

    results = []
    compiled = torch.compile(step if inside else layer, fullgraph=True, backend="aot_eager")
    for run in (lambda: step(layer), lambda: compiled(layer) if inside else step(compiled)):
        layer.zero_grad()
        loss = run()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in layer.parameters())])
    for mine, expected in zip(*results, strict=True):
        assert_same(mine, expected)
