"""amp_ext.nn: dropout, no activation, and checkpoints of torch's layers and of older ones."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.nn import MLP, GatedMLP, Linear, LinearActivation
from cases import assert_all_same, assert_same

FP16, FP32 = torch.float16, torch.float32


class PlainGated(nn.Module):
    """As in a Llama of torch's modules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(7, 6, bias=False)
        self.up_proj = nn.Linear(7, 6, bias=False)
        self.down_proj = nn.Linear(6, 4, bias=False)
        self.act_fn, self.drop = nn.SiLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def plain_mlp(dropout: float = 0.0) -> nn.Module:
    between = OrderedDict(act=nn.GELU(), drop=nn.Dropout(dropout))
    return nn.Sequential(OrderedDict(fc1=nn.Linear(7, 6), **between, fc2=nn.Linear(6, 4)))


BLOCKS = {"MLP": (MLP, plain_mlp), "GatedMLP": (GatedMLP, PlainGated)}
every_block = pytest.mark.parametrize(("ours", "theirs"), BLOCKS.values(), ids=BLOCKS)


def results(net: nn.Module, x: Tensor, region: bool = False) -> list[Tensor]:
    """Return the output and all gradients of a pass with a seed of its own."""
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    net.zero_grad()
    with amp_ext.autocast("cpu", dtype=FP16, enabled=region):
        out = net(leaf)
    out.sum().backward()
    return [out, leaf.grad, *(parameter.grad.clone() for parameter in net.parameters())]


@every_block
@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_dropout_is_torchs(
    ours: Callable[..., nn.Module], theirs: Callable[..., nn.Module], called: bool, region: bool
) -> None:
    """It drops the same elements under the same seed, whether the layers are called or not.

    In FP32 the sums of a few products are off by some of their units; in FP16 what each layer
    returns by one unit, and its gradients.
    """
    mine, plain = ours(7, 6, 4, dropout=0.5), theirs(0.5)
    mine.load_state_dict(plain.state_dict())
    if called:
        next(mine.children()).register_forward_hook(lambda module, inputs, out: None)
    tolerance = 2e-2 if region else 1e-5
    x = torch.randn(64, 7)
    pairs = zip(results(mine, x, region), results(plain, x, region), strict=True)
    for actual, expected in pairs:
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=64 * tolerance)
    torch.manual_seed(2)
    other = mine(x)
    assert (other - results(mine, x)[0]).norm() > 0.1 * other.norm()


@every_block
def test_dropout_while_evaluating(
    ours: Callable[..., nn.Module], theirs: Callable[..., nn.Module]
) -> None:
    """Nothing is dropped, and the block is one node; so it is in training without dropout."""
    block, x = ours(7, 6, 4, dropout=0.5).eval(), torch.randn(3, 7)
    without = ours(7, 6, 4)
    without.load_state_dict(block.state_dict())
    assert_all_same(results(block, x), results(without, x))
    node = {MLP: "MlpBackward", GatedMLP: "GatedMlpBackward"}[ours]
    assert block(x).grad_fn.name() == without(x).grad_fn.name() == node


@every_block
def test_compiled_dropout(ours: Callable[..., nn.Module], theirs: Callable[..., nn.Module]) -> None:
    torch._dynamo.reset()
    block, x = ours(7, 6, 4, dropout=0.5), torch.randn(3, 7)
    program = torch.compile(block, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_all_same(results(program, x), results(block, x))
        block.eval()


@every_block
@pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan")])
def test_dropout_is_a_probability(
    ours: Callable[..., nn.Module], theirs: Callable[..., nn.Module], dropout: float
) -> None:
    with pytest.raises(ValueError, match=rf"dropout must be .* between 0 and 1, got {dropout}"):
        ours(7, 6, dropout=dropout)


def test_no_activation() -> None:
    x, layer = torch.randn(3, 7), LinearActivation(7, 6, activation=None)
    plain = Linear(7, 6)
    plain.load_state_dict(layer.state_dict())
    assert_same(layer(x), plain(x))
    for make in (LinearActivation, MLP, GatedMLP):
        assert make(7, 6, activation=None).activation == "none"
        assert repr(make(7, 6, activation="none")) == repr(make(7, 6, activation=None))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Linear(7, 6), nn.Linear(7, 6)),
        (LinearActivation(7, 6), nn.Linear(7, 6)),
        (MLP(7, 6, 4), plain_mlp()),
        (GatedMLP(7, 6, 4), PlainGated()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_checkpoints_load_both_ways(ours: nn.Module, theirs: nn.Module) -> None:
    for to, other in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        to.load_state_dict(other.state_dict(), strict=True)
        state = other.state_dict()
        assert list(to.state_dict()) == list(state)
        for name, value in to.state_dict().items():
            assert_same(value, state[name])


def test_modules_pickled_before_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """amp_ext.nn was one file, and an MLP had no dropout."""
    mlp, x = MLP(7, 6, 4), torch.randn(3, 7)
    del mlp.__dict__["dropout"]
    with monkeypatch.context() as patch:
        patch.setattr(MLP, "__module__", "amp_ext.nn")
        pickled = pickle.dumps(mlp)
    same = pickle.loads(pickled)
    assert_same(same(x), mlp(x))
    assert "dropout" not in repr(same)
