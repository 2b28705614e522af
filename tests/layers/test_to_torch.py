"""amp_ext.nn.to_torch: the plain modules of a model that was built of ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from amp_ext.nn import MLP, GatedMLP, Linear, LinearActivation, to_torch
from cases import ACTIVATIONS, assert_all_same, assert_same

# Name -> the layer, for an activation and whether there are biases, and the class it becomes.
LAYERS: dict[str, tuple[Callable[[str, bool], nn.Module], type[nn.Module]]] = {
    "Linear": (lambda activation, bias: Linear(7, 6, bias), nn.Linear),
    "LinearActivation": (
        lambda activation, bias: LinearActivation(7, 6, bias, activation=activation),
        fx.GraphModule,
    ),
    "MLP": (
        lambda activation, bias: MLP(7, 6, 4, bias, activation=activation, dropout=0.25),
        nn.Sequential,
    ),
    "GatedMLP": (
        lambda activation, bias: GatedMLP(7, 6, 4, bias, activation=activation, dropout=0.25),
        fx.GraphModule,
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def passed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and gradients of a pass with a seed of its own."""
    torch.manual_seed(1)
    out = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.sum(), parameters)]


@every_layer
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("training", "bias"), [(True, False), (False, True)])
def test_computes_the_same_from_the_same_parameters(
    name: str, activation: str, training: bool, bias: bool
) -> None:
    """And nothing that is pickled needs this package. FP32 sums of few products differ by units."""
    make, kind = LAYERS[name]
    layer, x = make(activation, bias).train(training), torch.randn(64, 7)
    if bias:
        next(layer.parameters()).requires_grad_(False)
    before, state = passed(layer, x), layer.state_dict(keep_vars=True)
    flags = [p.requires_grad for p in layer.parameters()]
    plain = to_torch(layer)
    assert plain is layer
    if kind is fx.GraphModule and activation == "none" and name == "LinearActivation":
        kind = nn.Linear
    assert isinstance(plain, kind)
    after = plain.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[key] is state[key] for key in state)
    assert [p.requires_grad for p in plain.parameters()] == flags
    assert {module.training for module in plain.modules()} == {training}
    pickled = pickle.dumps(plain)
    assert b"amp_ext" not in pickled
    for other in (plain, copy.deepcopy(plain), pickle.loads(pickled)):
        assert list(other.state_dict()) == list(state)
        for actual, expected in zip(passed(other, x), before, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert plain(input=x).shape == before[0].shape


class Adapter(nn.Module):
    """A low-rank addend to a frozen layer, as LoRA has them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + self.up(self.down(input))


def test_a_model() -> None:
    """With adapters, tied weights, hooks and references from elsewhere, twice converted."""
    shared = LinearActivation(8, 8, activation="silu")
    first, mlp, gated = Linear(8, 8), MLP(8, 16), GatedMLP(8, 16)
    net = nn.Sequential(nn.ModuleList([shared])[0], first, nn.LayerNorm(8), mlp, gated, shared)
    first.weight = shared.weight
    mlp.fc1, gated.up_proj = Adapter(mlp.fc1), Adapter(gated.up_proj)
    seen: list[nn.Module] = []
    for layer in (shared, first, mlp, gated):
        layer.register_forward_hook(lambda module, inputs, out: seen.append(module))
        layer.register_full_backward_hook(lambda module, *grads: seen.append(module))
    x = torch.randn(5, 8, requires_grad=True)
    before, calls, state = passed(net, x), list(seen), list(net.state_dict())
    for _ in range(2):
        assert to_torch(net) is net
        assert not any(type(m).__module__.startswith("amp_ext") for m in net.modules())
        assert list(net.state_dict()) == state
        assert first.weight is shared.weight
        seen.clear()
        for actual, expected in zip(passed(net, x), before, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert seen == calls


@every_layer
def test_is_trained_and_compiled(name: str) -> None:
    """By the optimizer that it had before."""
    torch._dynamo.reset()
    layer, x = LAYERS[name][0]("gelu", True).eval(), torch.randn(3, 7)
    before = layer(x)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    program = torch.compile(to_torch(layer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(program(x), before, rtol=1e-5, atol=1e-5)
    layer(x).sum().backward()
    optimizer.step()
    assert (layer(x) - before).norm() > 0.01 * before.norm()


class Derived(MLP):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def wrapped(layer: nn.Module) -> nn.Module:
    forward = layer.forward
    layer.forward = lambda *args: 2 * forward(*args)
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def extended(layer: nn.Module) -> nn.Module:
    layer.add_module("norm", nn.Identity())
    return layer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Derived(7, 6), r"must be an amp_ext\.nn\.MLP itself, got the subclass Derived"),
        (
            lambda: parametrized(Linear(7, 7)),
            r"must be an amp_ext\.nn\.Linear itself.*ParametrizedLinear",
        ),
        (lambda: wrapped(GatedMLP(7, 6)), r"must have the forward of its class"),
        (lambda: extended(MLP(7, 6)), r"must have no modules but fc1 and fc2, got norm"),
    ],
    ids=["subclass", "parametrization", "forward", "another module"],
)
def test_refusals_change_nothing(make: Callable[[], Any], text: str) -> None:
    net, x = nn.Sequential(MLP(7, 7), make()), torch.randn(3, 7)
    before, classes = passed(net, x), [type(module) for module in net.modules()]
    with pytest.raises(TypeError, match=rf"amp_ext\.nn\.to_torch: 1 {text}"):
        to_torch(net)
    assert [type(module) for module in net.modules()] == classes
    assert_all_same(passed(net, x), before)


def test_hooks_of_a_plain_layer_are_kept_in_copies() -> None:
    """Of what becomes no GraphModule."""
    for layer in (Linear(7, 6), MLP(7, 6)):
        layer.register_forward_hook(lambda module, inputs, out: 2 * out)
        plain, x = to_torch(layer), torch.randn(3, 7)
        assert_same(copy.deepcopy(plain)(x), plain(x))
