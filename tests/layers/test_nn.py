"""amp_ext.nn: the layers against torch's layers, composed, under autocast and compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from amp_ext import ops
from amp_ext.nn import MLP, GatedMLP, Linear, LinearActivation
from cases import ACTIVATIONS, FLOATS, assert_equal, assert_same, integers, normal, unwritten
from executors import Executor, against_oracle, every_executor
from gemm_cases import cast, doubles

FP16, BF16, FP32, FP64 = FLOATS
SHAPES = [(7,), (5, 7), (2, 3, 5, 7), (0, 7)]
NAMES = ("x", "weight1", "bias1", "weight2", "bias2")

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def mlp_leaves(
    shape: tuple[int, ...],
    make: Callable[[tuple[int, ...]], Tensor],
    hidden: int = 6,
    columns: int = 4,
) -> dict[str, Any]:
    layers = ((hidden, shape[-1]), (hidden,), (columns, hidden), (columns,))
    shapes = dict(zip(NAMES, (shape, *layers), strict=True))
    return {name: make(s).requires_grad_() for name, s in shapes.items()}


def composed(leaves: dict[str, Tensor], activation: str) -> Tensor:
    x, weight1, bias1, weight2, bias2 = leaves.values()
    return F.linear(ACTIVATIONS[activation](F.linear(x, weight1, bias1)), weight2, bias2)


class Seen(TorchDispatchMode):
    """Names the ops of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "amp_ext":
            self.names.append(func.name().removeprefix("amp_ext::"))
        return func(*args, **(kwargs or {}))


# ---- the op mlp --------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("shape", [(7,), (2, 2, 7)], ids=str)
@every_activation
def test_derivatives(executor: Executor, activation: str, shape: tuple[int, ...]) -> None:
    leaves = mlp_leaves(shape, lambda s: normal(s, FP64, executor.device))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *t: executor.ops.mlp(*t, activation=activation), (*leaves.values(),))


@against_oracle
@every_activation
def test_derivatives_of_gemm(executor: Executor, activation: str) -> None:
    """Whose gelus depend on every argument."""
    shapes = {"a": (2, 3, 4), "b": (5, 4), "c": (3, 1), "bias": (5,)}
    leaves = {n: normal(s, FP64, executor.device).requires_grad_() for n, s in shapes.items()}
    options = {"trans_b": True, "alpha": 0.5, "beta": -2.0, "activation": activation}

    def run(*tensors: Tensor) -> Tensor:
        return ops.gemm(**dict(zip(leaves, tensors, strict=True)), **options)

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(run, tuple(leaves.values()))


@every_executor
@every_shape
@pytest.mark.parametrize("dtypes", [(FP16, FP16), (FP16, FP32)], ids=str)
def test_exact_gradients(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    """Of integers that FP16 represents: in the dtype of each tensor."""
    activation = "relu"
    leaves = mlp_leaves(shape, lambda s: integers(s, FP32, executor.device, limit=1))
    leaves = cast(leaves, (dtypes[0], dtypes[1], FP32, dtypes[1], FP16))
    same = doubles(leaves)
    with unwritten(leaves.values()):
        out = executor.ops.mlp(**leaves, activation=activation)
        grad = integers(tuple(out.shape), out.dtype, executor.device)
        out.backward(grad)
    exact = composed(same, activation)
    exact.backward(grad.double())
    assert_equal(out, exact)
    assert out.dtype == torch.promote_types(*dtypes)
    for leaf, expected in zip(leaves.values(), same.values(), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_equal(leaf.grad, expected.grad)


@against_oracle
@every_activation
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_is_no_less_exact_than_torch(
    executor: Executor, dtype: torch.dtype, activation: str
) -> None:
    """Of output and gradients: the RMS error against float64 is at most that of torch's layers.

    Up to a fifth, since the 96 elements of a bias are a sample of errors whose RMS varies by a
    fourteenth; and up to FP32's unit where torch is exact.
    """
    leaves = mlp_leaves((256, 64), lambda s: normal(s, FP32, executor.device), 96, 96)
    leaves = cast(leaves, [dtype] * 5)
    grad = normal((256, 96), dtype, executor.device)
    results = []
    for tensors, run in (
        (doubles(leaves), lambda t: composed(t, activation)),
        (leaves, lambda t: ops.mlp(**t, activation=activation)),
        (cast(leaves, [dtype] * 5), lambda t: composed(t, activation)),
    ):
        out = run(tensors)
        grads = torch.autograd.grad(out, list(tensors.values()), grad.to(out.dtype))
        results.append([tensor.double() for tensor in (out, *grads)])
    for exact, mine, torchs in zip(*results, strict=True):
        error, theirs = ((other - exact).square().mean().sqrt() for other in (mine, torchs))
        assert error <= 1.2 * theirs + 2.0**-22 * exact.square().mean().sqrt()


@against_oracle
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_products(executor: Executor, activation: str) -> None:
    """One product a layer forward, of which the first keeps the gelu's argument; in the backward
    pass two a layer, of which one has the derivative, and no sum for the first bias."""
    leaves = mlp_leaves((3, 5, 7), lambda s: normal(s, FP16, executor.device))
    with Seen() as forward:
        out = ops.mlp(**leaves, activation=activation)
    assert forward.names == ["gemm_with_aux" if activation == "gelu" else "gemm", "gemm"]
    with Seen() as backward:
        out.sum().backward()
    assert backward.names == ["gemm", "gemm_times_derivative", "gemm", "gemm"]


@against_oracle
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_only_what_is_wanted_is_computed(executor: Executor, activation: str, wanted: str) -> None:
    leaves = mlp_leaves((5, 7), lambda s: normal(s, FP16, executor.device))
    out = ops.mlp(**leaves, activation=activation)
    expected = torch.autograd.grad(out.sum(), leaves[wanted])[0]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    with Seen() as forward:
        out = ops.mlp(**leaves, activation=activation)
    assert ("gemm_with_aux" in forward.names) == (
        activation == "gelu" and wanted in ("x", "weight1", "bias1")
    )
    with Seen() as backward:
        out.sum().backward()
    count = {"x": 2, "weight1": 2, "bias1": 1, "weight2": 1, "bias2": 0}[wanted]
    assert len(backward.names) == count
    assert_same(leaves[wanted].grad, expected)


@against_oracle
@pytest.mark.parametrize(("activation", "bias"), [("none", False), ("gelu", True)])
def test_opcheck(executor: Executor, activation: str, bias: bool) -> None:
    leaves = mlp_leaves((3, 5, 7), lambda s: normal(s, FP32, executor.device))
    if not bias:
        leaves |= {"bias1": None, "bias2": None}
    options = {"activation": activation}
    torch.library.opcheck(torch.ops.amp_ext.mlp.default, (), leaves | options)


MLP_FAULTS = {
    "x": (lambda t: t[..., :3], r"x must have 7 columns.*got shape \[5, 3\]"),
    "weight1": (lambda t: t[:, :3], r"x must have 3 columns for weight1.*, got shape \[5, 7\]"),
    "bias1": (lambda t: t[:3], r"bias1 must have shape \[6\], got shape \[3\]"),
    "weight2": (lambda t: t[:, :3], r"weight1 must have 3 rows for weight2.*got shape \[6, 7\]"),
    "bias2": (lambda t: t[:3], r"bias2 must have shape \[4\], got shape \[3\]"),
}


@pytest.mark.parametrize("name", MLP_FAULTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_shapes(device: str, name: str) -> None:
    spoil, text = MLP_FAULTS[name]
    leaves = mlp_leaves((5, 7), lambda s: torch.zeros(s, device=device))
    with pytest.raises(RuntimeError, match=f"amp_ext::mlp: {text}"):
        ops.mlp(**leaves | {name: spoil(leaves[name])})


# ---- the layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_torchs(bias: bool) -> None:
    """Names, initial values and the way they are drawn."""
    torch.manual_seed(0)
    ours, fused, mlp = Linear(5, 3, bias), LinearActivation(5, 3, bias), MLP(5, 4, 3, bias)
    gated = GatedMLP(5, 4, 3, bias)
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


def test_unknown_activation() -> None:
    for make in (LinearActivation, MLP, GatedMLP):
        with pytest.raises(ValueError, match=r"must be None or one of none, relu.*, got 'swish'"):
            make(2, 2, activation="swish")


@pytest.mark.parametrize("activation", ["gelu"])
@pytest.mark.parametrize(
    "make",
    [
        lambda a: LinearActivation(7, 4, activation=a),
        lambda a: MLP(7, 6, 4, activation=a),
        lambda a: GatedMLP(7, 6, 4, activation=a),
    ],
)
def test_copies_and_pickles(make: Callable[[str], nn.Module], activation: str) -> None:
    layer, x = make(activation), torch.randn(3, 7)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(twin(x), layer(x))


@against_oracle
@every_activation
@pytest.mark.parametrize("shape", SHAPES[:3:2], ids=str)
@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
@pytest.mark.parametrize("make", [LinearActivation, MLP, GatedMLP])
def test_autocast(
    executor: Executor,
    make: type[nn.Module],
    region: Callable[..., Any],
    shape: tuple[int, ...],
    activation: str,
) -> None:
    """FP16 in the layer, FP32 gradients that FP16 would not hold: 2**18 times the rows."""
    layer = make(7, 6, activation=activation, device=executor.device)
    keys = list(layer.state_dict())
    x = torch.full(shape, 2.0**9, device=executor.device).requires_grad_()
    products = sum(parameter.dim() == 2 for parameter in layer.parameters())
    with region(executor.device.type, dtype=FP16), Seen() as seen:
        out = layer(x)
    assert out.dtype == FP16
    assert out.shape == (*shape[:-1], layer(x).shape[-1])
    assert seen.names.count("gemm") + seen.names.count("gemm_with_aux") == products
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
