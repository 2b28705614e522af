"""Test that blocks of amp_ext.nn call layers whose parameters do not tell what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from amp_ext.nn import MLP, GatedMLP
from cases import ACTIVATIONS, assert_all_same, assert_same

BLOCKS = {"fc1": MLP, "fc2": MLP, "gate_proj": GatedMLP, "up_proj": GatedMLP, "down_proj": GatedMLP}
NODES = {MLP: "GemmBackward", GatedMLP: "GatedMlpBackward"}
every_layer = pytest.mark.parametrize("name", BLOCKS)


def called(block: nn.Module, x: Tensor) -> Tensor:
    """Compute a block by calls of its layers and of torch's functions."""
    act, drop = ACTIVATIONS[block.activation], nn.Dropout(block.dropout)
    drop.train(block.training)
    if isinstance(block, MLP):
        return block.fc2(drop(act(block.fc1(x))))
    return block.down_proj(drop(act(block.gate_proj(x)) * block.up_proj(x)))


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
    "weight": lambda layer: setattr(
        layer, "weight", nn.Parameter(layer.weight.detach().as_subclass(DoublingWeight))
    ),
}


@every_layer
def test_plain_layers_are_fused(name: str) -> None:
    """Plain layers are fused, also while a view replaces a weight."""
    block, x = BLOCKS[name](7, 6, 4), torch.randn(3, 7)
    node = NODES[BLOCKS[name]]
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
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_called(kind: str, name: str) -> None:
    """A layer with backward hooks is called."""
    block, seen = BLOCKS[name](7, 6, 4), []
    getattr(getattr(block, name), kind)(lambda module, *grads: seen.append(module))
    block(torch.randn(3, 7, requires_grad=True)).sum().backward()
    assert seen == [getattr(block, name)]


def test_hooks_of_every_module_are_called() -> None:
    """Layers are called while hooks of all modules exist."""
    mlp, seen = MLP(7, 6, 4), []
    handle = register_module_forward_hook(lambda module, *rest: seen.append(module))
    try:
        mlp(torch.randn(3, 7))
    finally:
        handle.remove()
    assert seen == [mlp.fc1, mlp.fc2, mlp]


def test_forward_of_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced forward of nn.Linear is called."""
    mlp, x = MLP(7, 6, 4), torch.randn(3, 7)
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, h: h @ layer.weight.mT)
    assert_same(mlp(x), F.gelu(x @ mlp.fc1.weight.mT) @ mlp.fc2.weight.mT)


@pytest.mark.parametrize("change", ["forward hook", "forward", "class"])
def test_changed_layer_compiles(change: str) -> None:
    """A layer that is called compiles in one graph."""
    torch._dynamo.reset()
    block, x = MLP(7, 6, 4), torch.randn(3, 7)
    CHANGES[change](block.fc1)
    program = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(program(x), called(block, x))


@pytest.mark.parametrize("make", [MLP, GatedMLP])
def test_dropout_is_torchs(make: type[nn.Module]) -> None:
    """The same seed drops the same elements; eval mode drops none and fuses."""
    block, x = make(7, 6, 4, bias=True, dropout=0.5), torch.randn(64, 7)
    results = []
    for run in (block, lambda x: called(block, x)):
        torch.manual_seed(1)
        out = run(x)
        results.append([out, *torch.autograd.grad(out.sum(), list(block.parameters()))])
    assert_all_same(*results)
    assert not torch.equal(block(x), block(x))
    block.eval()
    torch.testing.assert_close(block(x), called(block, x), rtol=1e-5, atol=1e-5)
    assert block(x).grad_fn.name() == NODES[make]
