"""Test amp_ext.nn: parameters, autocast and compilation of the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.nn import MLP, GatedMLP, Linear, LinearActivation
from autocast_cases import Seen
from cases import assert_same, normal
from executors import Executor, against_oracle

FP16, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_torchs(bias: bool) -> None:
    """Layers have the names, initial values and checkpoints of torch's layers."""
    torch.manual_seed(0)
    ours, fused = Linear(5, 3, bias), LinearActivation(5, 3, bias, "meta").to_empty(device="cpu")
    fused.reset_parameters()  # as FSDP does
    mlp, gated = MLP(5, 4, 3, bias), GatedMLP(5, 4, 3, bias)
    torch.manual_seed(0)
    theirs, others = nn.Linear(5, 3, bias), nn.Linear(5, 3, bias)
    two = nn.ModuleDict({"fc1": nn.Linear(5, 4, bias), "fc2": nn.Linear(4, 3, bias)})
    shapes = {"gate_proj": (5, 4), "up_proj": (5, 4), "down_proj": (4, 3)}
    three = nn.ModuleDict({name: nn.Linear(*shape, bias) for name, shape in shapes.items()})
    for module, other in ((ours, theirs), (fused, others), (mlp, two), (gated, three)):
        state = other.state_dict()
        assert list(module.state_dict()) == list(state)
        for name, value in module.state_dict().items():
            assert_same(value, state[name])
        module.load_state_dict(state)
    assert MLP(5, 4).fc2.out_features == GatedMLP(5, 4).down_proj.out_features == 5
    assert GatedMLP(5, 4).up_proj.bias is None
    assert repr(fused) == f"LinearActivation({theirs.extra_repr()}, activation='gelu')"


def test_layer_with_an_activation_is_not_torchs_linear() -> None:
    """Tools that merge, replace or quantize every nn.Linear leave LinearActivation alone."""
    assert isinstance(Linear(7, 6), nn.Linear)
    assert not isinstance(LinearActivation(7, 6), nn.Linear)
    with pytest.raises(TypeError, match="activation"):
        Linear(7, 6, activation="gelu")


def test_options() -> None:
    """None means no activation. Unknown activations and impossible dropouts are errors."""
    for make in (LinearActivation, MLP, GatedMLP):
        assert make(2, 2, activation=None).activation == "none"
        with pytest.raises(ValueError, match=r"None or one of none, relu.*, got 'swish'"):
            make(2, 2, activation="swish")
    for make in (MLP, GatedMLP):
        for dropout in (-0.1, 1.5, float("nan")):
            with pytest.raises(ValueError, match=rf"between 0 and 1, got {dropout}"):
                make(2, 2, dropout=dropout)


@against_oracle
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
@pytest.mark.parametrize("make", [LinearActivation, MLP, GatedMLP])
def test_autocast(
    executor: Executor,
    make: type[nn.Module],
    region: Callable[..., Any],
    shape: tuple[int, ...],
    activation: str,
) -> None:
    """Products are FP16, and gradients FP32: FP16 cannot hold sums of 2**18 rows."""
    layer = make(7, 6, activation=activation, device=executor.device)
    keys = list(layer.state_dict())
    x = torch.full(shape, 2.0**9, device=executor.device).requires_grad_()
    products, is_curved = sum(p.dim() == 2 for p in layer.parameters()), activation == "gelu"
    with region(executor.device.type, dtype=FP16), Seen() as seen:
        out = layer(x)
    assert out.dtype == FP16
    assert out.shape == (*shape[:-1], layer(x).shape[-1])
    assert seen.names.count("gemm_with_aux") == is_curved
    assert seen.names.count("gemm") == products - is_curved
    out.backward(torch.full_like(out, 2.0**9))
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.dtype == FP32
    assert list(layer.state_dict()) == keys
    if make is LinearActivation and activation == "none":
        rows = out.numel() // out.shape[-1]
        assert layer.weight.grad.unique().tolist() == [rows * 2.0**18]


@against_oracle
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("make", [LinearActivation, MLP, GatedMLP])
def test_compiles(executor: Executor, make: type[nn.Module], inside: bool) -> None:
    """Compiled layers compute the same, in a region inside or outside of the program."""
    torch._dynamo.reset()
    layer = make(7, 6, activation="gelu", device=executor.device)
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
