"""Test amp_ext.nn with hooks, adapters, parametrizations and quantization of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.nn.utils import parametrize, prune

from amp_ext.nn import MLP, GatedMLP, Linear, LinearActivation
from cases import ACTIVATIONS, assert_same

BLOCKS = {"fc1": MLP, "fc2": MLP, "gate_proj": GatedMLP, "up_proj": GatedMLP, "down_proj": GatedMLP}
every_layer = pytest.mark.parametrize("name", BLOCKS)


def called(block: nn.Module, x: Tensor) -> Tensor:
    activation = ACTIVATIONS[block.activation]
    if isinstance(block, MLP):
        return block.fc2(activation(block.fc1(x)))
    return block.down_proj(activation(block.gate_proj(x)) * block.up_proj(x))


class Adapter(nn.Module):
    """A layer around another one, with the other's attributes, as adapters have them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, input: Tensor) -> Tensor:
        return 2 * self.base(input)


class Doubling(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class DoublingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoublingWeight(Tensor):
    """A tensor that replaces twice its elements, like a quantized weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return func(args[0], 2 * args[1].as_subclass(Tensor), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


def override(layer: nn.Linear) -> None:
    forward = layer.forward
    layer.forward = lambda input: 2 * forward(input)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda m, i, out: 2 * out),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda m, i: 2 * i[0]),
    "forward": override,
    "class": lambda layer: setattr(layer, "__class__", DoublingLinear),
    "parametrization": lambda layer: parametrize.register_parametrization(
        layer, "weight", Doubling()
    ),
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.9),
    "weight": lambda layer: setattr(
        layer, "weight", nn.Parameter(layer.weight.detach().as_subclass(DoublingWeight))
    ),
}


@every_layer
def test_plain_layers_are_fused(name: str) -> None:
    """Plain layers are one node, also while a view replaces a weight."""
    block, x = BLOCKS[name](7, 6, 4), torch.randn(3, 7)
    node = {MLP: "MlpBackward", GatedMLP: "GatedMlpBackward"}[BLOCKS[name]]
    views = {name: value.view_as(value) for name, value in block.named_parameters()}
    for out in (block(x), torch.func.functional_call(block, views, (x,))):
        assert out.grad_fn.name() == node
    getattr(block, name).register_forward_hook(lambda module, inputs, out: None).remove()
    assert block(x).grad_fn.name() == node


@every_layer
@pytest.mark.parametrize("change", CHANGES)
def test_changed_layer_is_called(change: str, name: str) -> None:
    """A layer that would compute something else is called."""
    block, x = BLOCKS[name](7, 6, 4), torch.randn(3, 7)
    before = block(x)
    CHANGES[change](getattr(block, name))
    expected = called(block, x)
    assert (expected - before).norm() > 0.1 * before.norm()
    assert_same(block(x), expected)


@every_layer
@pytest.mark.parametrize("replace", [Adapter, lambda layer: nn.Identity()], ids=["adapter", "none"])
def test_replaced_layer_is_called(replace: Callable[[nn.Linear], nn.Module], name: str) -> None:
    """A module in a layer's place is called."""
    block, x = BLOCKS[name](7, 7, 7), torch.randn(3, 7)
    setattr(block, name, replace(getattr(block, name)))
    assert_same(block(x), called(block, x))


@every_layer
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_called(kind: str, name: str) -> None:
    """A layer with backward hooks is called."""
    block, seen = BLOCKS[name](7, 6, 4), []
    getattr(getattr(block, name), kind)(lambda module, *grads: seen.append(module))
    block(torch.randn(3, 7, requires_grad=True)).sum().backward()
    assert seen == [getattr(block, name)]


@pytest.mark.parametrize(
    "register",
    [
        register_module_forward_hook,
        register_module_forward_pre_hook,
        register_module_full_backward_hook,
        register_module_full_backward_pre_hook,
    ],
)
def test_hooks_of_every_module_are_called(register: Callable[..., Any]) -> None:
    """Layers are called while hooks of all modules exist."""
    mlp, seen = MLP(7, 6, 4), []
    handle = register(lambda module, *rest: seen.append(module))
    try:
        mlp(torch.randn(3, 7, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert [m for m in seen if m is not mlp] in ([mlp.fc1, mlp.fc2], [mlp.fc2, mlp.fc1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.skipif(
    {*torch.backends.quantized.supported_engines} <= {"none"},
    reason="this torch has no engine for quantized layers",
)
def test_dynamic_quantization() -> None:
    """MLP's layers are quantized as torch's; LinearActivation is left alone."""
    mlp, head, x = MLP(7, 6, 4), LinearActivation(7, 6), torch.randn(3, 7)
    small = quantize_dynamic(mlp, {nn.Linear})
    theirs = quantize_dynamic(nn.Sequential(mlp.fc1, nn.GELU(), mlp.fc2), {nn.Linear})
    assert type(small.fc1) is type(small.fc2) is torch.ao.nn.quantized.dynamic.Linear
    assert_same(small(x), theirs(x))
    assert_same(quantize_dynamic(head, {nn.Linear})(x), head(x))


def test_forward_of_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced forward of nn.Linear is called."""
    mlp, x = MLP(7, 6, 4), torch.randn(3, 7)
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, h: h @ layer.weight.mT)
    assert_same(mlp(x), F.gelu(x @ mlp.fc1.weight.mT) @ mlp.fc2.weight.mT)


@pytest.mark.parametrize("change", ["forward hook", "forward", "class", "parametrization"])
def test_changed_layer_compiles(change: str) -> None:
    """A layer that is called compiles in one graph."""
    torch._dynamo.reset()
    block, x = MLP(7, 6, 4), torch.randn(3, 7)
    CHANGES[change](block.fc1)
    program = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(program(x), called(block, x))


# ---- an activation cannot be lost ----------------------------------------------------------------


def test_layer_with_an_activation_is_not_torchs_linear() -> None:
    """Tools that merge or replace every nn.Linear leave LinearActivation alone."""
    assert isinstance(Linear(7, 6), nn.Linear)
    assert not isinstance(LinearActivation(7, 6), nn.Linear)
    with pytest.raises(TypeError, match="activation"):
        Linear(7, 6, activation="gelu")


def test_layer_with_an_activation_is_built_on_the_meta_device() -> None:
    """A layer of the meta device is initialized afterwards, as by FSDP."""
    layer = LinearActivation(7, 6, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    same = nn.Linear(7, 6)
    assert_same(layer.weight, same.weight)
    assert_same(layer.bias, same.bias)
