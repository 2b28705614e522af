"""Test amp_ext.ops.gated_mlp against a composition of torch's ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from amp_ext import ops
from autocast_cases import Seen
from cases import (
    ACTIVATIONS,
    FLOATS,
    assert_all_same,
    assert_equal,
    assert_same,
    integers,
    normal,
    unwritten,
)
from executors import Executor, against_oracle, every_executor
from gemm_cases import cast, doubles

FP16, BF16, FP32, FP64 = FLOATS
NAMES = ("x", "gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias")

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def leaves_of(
    shape: tuple[int, ...],
    make: Callable[[tuple[int, ...]], Tensor],
    hidden: int = 6,
    columns: int = 4,
) -> dict[str, Any]:
    """Return an input of 7 columns, or as many as the shape has, and the layers' parameters."""
    first = [(hidden, shape[-1]), (hidden,)] * 2
    shapes = zip(NAMES, [shape, *first, (columns, hidden), (columns,)], strict=True)
    return {name: make(shape).requires_grad_() for name, shape in shapes}


def composed(leaves: dict[str, Tensor], activation: str) -> Tensor:
    x, *first, weight, bias = leaves.values()
    hidden = ACTIVATIONS[activation](F.linear(x, *first[:2])) * F.linear(x, *first[2:])
    return F.linear(hidden, weight, bias)


@every_executor
@every_activation
def test_derivatives(executor: Executor, activation: str) -> None:
    """First and second derivatives equal finite differences."""
    leaves = leaves_of((2, 2, 7), lambda s: normal(s, FP64, executor.device))
    run = executor.ops.gated_mlp
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *t: run(*t, activation=activation), (*leaves.values(),))


@every_executor
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("dtypes", [(FP16, FP16), (FP16, FP32), (FP32, FP64)], ids=str)
def test_exact_gradients(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    """Results and gradients of small integers are exact, in the dtype of each tensor.

    The factors of a gated layer may have two dtypes.
    """
    leaves = leaves_of(shape, lambda s: integers(s, FP32, executor.device, limit=1))
    low, high = dtypes
    leaves = cast(leaves, (low, low, FP32, high, FP16, high, low))
    same = doubles(leaves)
    with unwritten(leaves.values()):
        out = executor.ops.gated_mlp(**leaves, activation="relu")
        grad = integers(tuple(out.shape), out.dtype, executor.device, limit=1)
        out.backward(grad)
    exact = composed(same, "relu")
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
    """The RMS error of output and gradients is at most torch's, up to a fifth.

    The 96 elements of a bias are a sample of errors, and their RMS varies by a fourteenth. If torch
    is exact, the limit is FP32's unit.
    """
    leaves = leaves_of((256, 64), lambda s: normal(s, FP32, executor.device), 96, 96)
    leaves = cast(leaves, [dtype] * len(leaves))
    grad = normal((256, 96), dtype, executor.device)
    results = []
    for tensors, run in (
        (doubles(leaves), lambda t: composed(t, activation)),
        (leaves, lambda t: ops.gated_mlp(**t, activation=activation)),
        (cast(leaves, [dtype] * len(leaves)), lambda t: composed(t, activation)),
    ):
        out = run(tensors)
        grads = torch.autograd.grad(out, list(tensors.values()), grad.to(out.dtype))
        results.append([tensor.double() for tensor in (out, *grads)])
    for exact, mine, torchs in zip(*results, strict=True):
        error, theirs = ((other - exact).square().mean().sqrt() for other in (mine, torchs))
        assert error <= 1.2 * theirs + 2.0**-22 * exact.square().mean().sqrt()


@against_oracle
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_products_and_saved_tensors(executor: Executor, activation: str) -> None:
    """A layer is one product forward and two backward; few tensors are saved.

    The saved tensors are the input and two hidden ones.
    """
    leaves = leaves_of((3, 5, 7), lambda s: normal(s, FP16, executor.device))
    kept: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with Seen() as forward, keep:
        out = ops.gated_mlp(**leaves, activation=activation)
    first = "gemm_with_aux" if activation == "silu" else "gemm"
    assert forward.names == [first, "gemm", "gemm"]
    weights = {leaf.data_ptr() for name, leaf in leaves.items() if "weight" in name}
    others = [tuple(t.shape) for t in kept if t.data_ptr() not in weights]
    assert sorted(others) == [(3, 5, 6), (3, 5, 6), (3, 5, 7)]
    with Seen() as backward:
        out.sum().backward()
    assert backward.names == ["gemm"] * 6


class Alive(TorchDispatchMode):
    """Count the results of the forward pass that are alive at each op of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() != -1:
            self.counts += [sum(ref() is not None for ref in self.results)]
            return func(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.results += [weakref.ref(each) for each in tree_leaves(results)]
        return results


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_frees_tensors_after_their_last_use(activation: str) -> None:
    """The gradients of the first layer are computed after the hidden layer has been freed."""
    leaves = leaves_of((3, 7), lambda shape: torch.ones(shape, dtype=FP16))
    for retain in (True, False):
        with Alive() as alive:
            out = ops.gated_mlp(**leaves, activation=activation).sum()
            out.backward(retain_graph=retain)
        assert alive.counts[0] > 2
        assert alive.counts[-1] == (alive.counts[0] if retain else 2)  # the result and its sum


@against_oracle
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_only_wanted_gradients_are_computed(
    executor: Executor, activation: str, wanted: str
) -> None:
    """The gradient of one tensor takes only its own products, and is the same."""
    leaves = leaves_of((5, 7), lambda s: normal(s, FP16, executor.device))
    out = ops.gated_mlp(**leaves, activation=activation)
    expected = torch.autograd.grad(out.sum(), leaves[wanted])[0]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    with Seen() as forward:
        out = ops.gated_mlp(**leaves, activation=activation)
    needs_argument = wanted != "down_bias"
    assert ("gemm_with_aux" in forward.names) == (activation == "silu" and needs_argument)
    with Seen() as backward:
        out.sum().backward()
    counts = {"down_bias": 0, "down_weight": 1, "gate_bias": 1, "up_bias": 1, "x": 3}
    assert len(backward.names) == counts.get(wanted, 2)
    assert_same(leaves[wanted].grad, expected)


@against_oracle
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_checkpointed(executor: Executor, activation: str) -> None:
    """A backward pass unpacks each saved tensor once, as a checkpoint needs it."""
    given = list(leaves_of((5, 7), lambda s: normal(s, FP16, executor.device)).values())

    def run(*tensors: Tensor) -> Tensor:
        return ops.gated_mlp(*tensors, activation=activation)

    outs = run(*given), checkpoint(run, *given, use_reentrant=False)
    assert_all_same(*(torch.autograd.grad(out.sum(), given) for out in outs))


Spoil = Callable[[Tensor], Tensor]
FAULTS: dict[str, tuple[Spoil, str]] = {
    "x": (lambda t: t[..., :3], r"x must have 7 columns.*got shape \[5, 3\]"),
    "gate_weight": (lambda t: t[:, :3], r"x must have 3 columns for gate_weight.*\[6, 3\]"),
    "gate_bias": (lambda t: t[:3], r"gate_bias must have shape \[6\], got shape \[3\]"),
    "up_weight": (lambda t: t[:3], r"gate_weight must have 3 rows, as up_weight"),
    "up_bias": (lambda t: t[:3], r"up_bias must have shape \[6\], got shape \[3\]"),
    "down_weight": (lambda t: t[:, :3], r"up_weight must have 3 rows for down"),
    "down_bias": (lambda t: t[:3], r"down_bias must have shape \[4\], got shape \[3\]"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_shapes(device: str, name: str) -> None:
    """A bad shape is an error that names the argument."""
    spoil, text = FAULTS[name]
    leaves = leaves_of((5, 7), lambda s: torch.zeros(s, device=device))
    if name != "up_bias":
        leaves["up_bias"] = None
    with pytest.raises(RuntimeError, match=f"amp_ext::gated_mlp: {text}"):
        ops.gated_mlp(**leaves | {name: spoil(leaves[name])})
