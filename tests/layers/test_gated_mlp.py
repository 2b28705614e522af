"""amp_ext.ops.gated_mlp against a composition of torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_ext import ops
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
    first = ((hidden, shape[-1]), (hidden,))
    shapes = dict(zip(NAMES, (shape, *first, *first, (columns, hidden), (columns,)), strict=True))
    return {name: make(s).requires_grad_() for name, s in shapes.items()}


def composed(leaves: dict[str, Tensor], activation: str) -> Tensor:
    x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = leaves.values()
    gate = ACTIVATIONS[activation](F.linear(x, gate_weight, gate_bias))
    return F.linear(gate * F.linear(x, up_weight, up_bias), down_weight, down_bias)


class Seen(TorchDispatchMode):
    """Names the ops of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "amp_ext":
            self.names.append(func.name().removeprefix("amp_ext::"))
        return func(*args, **(kwargs or {}))


@every_executor
@pytest.mark.parametrize("shape", [(7,), (2, 2, 7)], ids=str)
@every_activation
def test_derivatives(executor: Executor, activation: str, shape: tuple[int, ...]) -> None:
    leaves = leaves_of(shape, lambda s: normal(s, FP64, executor.device))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(
            lambda *t: executor.ops.gated_mlp(*t, activation=activation), (*leaves.values(),)
        )


@every_executor
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("dtypes", [(FP16, FP16), (FP16, FP32), (FP32, FP16)], ids=str)
def test_exact_gradients(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    """Of integers that FP16 represents: in the dtype of each tensor."""
    leaves = leaves_of(shape, lambda s: integers(s, FP32, executor.device, limit=1))
    leaves = cast(leaves, (FP16, dtypes[0], FP32, dtypes[1], FP16, dtypes[1], FP16))
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
    """Of output and gradients: the RMS error against float64 is at most that of torch's layers.

    Up to a fifth, since the 96 elements of a bias are a sample of errors whose RMS varies by a
    fourteenth; and up to FP32's unit where torch is exact.
    """
    leaves = leaves_of((256, 64), lambda s: normal(s, FP32, executor.device), 96, 96)
    leaves = cast(leaves, [dtype] * len(NAMES))
    grad = normal((256, 96), dtype, executor.device)
    results = []
    for tensors, run in (
        (doubles(leaves), lambda t: composed(t, activation)),
        (leaves, lambda t: ops.gated_mlp(**t, activation=activation)),
        (cast(leaves, [dtype] * len(NAMES)), lambda t: composed(t, activation)),
    ):
        out = run(tensors)
        grads = torch.autograd.grad(out, list(tensors.values()), grad.to(out.dtype))
        results.append([tensor.double() for tensor in (out, *grads)])
    for exact, mine, torchs in zip(*results, strict=True):
        error, theirs = ((other - exact).square().mean().sqrt() for other in (mine, torchs))
        assert error <= 1.2 * theirs + 2.0**-22 * exact.square().mean().sqrt()


@against_oracle
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_products_and_what_is_kept(executor: Executor, activation: str) -> None:
    """One product a layer forward, two in the backward pass; of activations, the input and what
    the hidden layer is computed from."""
    leaves = leaves_of((3, 5, 7), lambda s: normal(s, FP16, executor.device))
    kept: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with Seen() as forward, keep:
        out = ops.gated_mlp(**leaves, activation=activation)
    first = "gemm_with_aux" if activation == "silu" else "gemm"
    assert forward.names == [first, "gemm", "gemm"]
    weights = {leaves[n].data_ptr() for n in ("gate_weight", "up_weight", "down_weight")}
    others = [tuple(t.shape) for t in kept if t.data_ptr() not in weights]
    assert sorted(others) == [(3, 5, 6), (3, 5, 6), (3, 5, 7)]
    with Seen() as backward:
        out.sum().backward()
    assert backward.names == ["gemm"] * 6


@against_oracle
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_checkpointed(executor: Executor, activation: str) -> None:
    """Which lets a backward pass unpack each tensor once."""
    leaves = leaves_of((5, 7), lambda s: normal(s, FP16, executor.device))

    def run(*tensors: Tensor) -> Tensor:
        return ops.gated_mlp(*tensors, activation=activation)

    def run_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, *last: Tensor) -> Tensor:
        return ops.mlp(x, weight1, bias1, *last[-2:], activation=activation)

    given = list(leaves.values())
    for function in (run, run_mlp):
        out = function(*given), checkpoint(function, *given, use_reentrant=False)
        plain, again = (torch.autograd.grad(o.sum(), given, allow_unused=True) for o in out)
        used = [(one, other) for one, other in zip(again, plain, strict=True) if other is not None]
        assert_all_same(*zip(*used, strict=True))


@every_activation
def test_factors_of_two_dtypes(activation: str) -> None:
    leaves = leaves_of((5, 7), lambda s: normal(s, FP64, "cpu"))
    for name in ("gate_weight", "gate_bias"):
        leaves[name] = leaves[name].detach().float().requires_grad_()
    leaves["x"] = leaves["x"].detach().float().requires_grad_()
    out = ops.gated_mlp(*leaves.values(), activation=activation)
    ours = torch.autograd.grad(out.sum(), list(leaves.values()))
    expected = torch.autograd.grad(
        composed({k: v.double() for k, v in leaves.items()}, activation).sum(),
        list(leaves.values()),
    )
    for one, other in zip(ours, expected, strict=True):
        # The first layer is of float32; sums of 7 terms of normal numbers, through three layers.
        torch.testing.assert_close(one.double(), other.double(), rtol=2.0**-16, atol=2.0**-16)


@against_oracle
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_only_what_is_wanted_is_computed(executor: Executor, activation: str, wanted: str) -> None:
    leaves = leaves_of((5, 7), lambda s: normal(s, FP16, executor.device))
    out = ops.gated_mlp(**leaves, activation=activation)
    expected = torch.autograd.grad(out.sum(), leaves[wanted])[0]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    with Seen() as forward:
        out = ops.gated_mlp(**leaves, activation=activation)
    assert ("gemm_with_aux" in forward.names) == (activation == "silu" and wanted != "down_bias")
    with Seen() as backward:
        out.sum().backward()
    counts = {"x": 3, "gate_bias": 1, "up_bias": 1, "down_weight": 1, "down_bias": 0}
    assert len(backward.names) == counts.get(wanted, 2)
    assert_same(leaves[wanted].grad, expected)


@against_oracle
def test_opcheck(executor: Executor) -> None:
    leaves = leaves_of((3, 5, 7), lambda s: normal(s, FP32, executor.device))
    leaves |= {"gate_bias": None, "down_bias": None}
    torch.library.opcheck(torch.ops.amp_ext.gated_mlp.default, (), leaves)


FAULTS = {
    "x": (lambda t: t[..., :3], r"x must have 7 columns.*got shape \[5, 3\]"),
    "gate_weight": (
        lambda t: t[:3],
        r"gate_weight must have 6 rows, as up_weight has, got shape \[3, 7\]",
    ),
    "up_weight": (lambda t: t[:, :3], r"x must have 3 columns for up_weight.*got shape \[5, 7\]"),
    "gate_bias": (lambda t: t[:3], r"gate_bias must have shape \[6\], got shape \[3\]"),
    "up_bias": (lambda t: t[:3], r"up_bias must have shape \[6\], got shape \[3\]"),
    "down_weight": (
        lambda t: t[:, :3],
        r"up_weight must have 3 rows for down_weight.*got shape \[6, 7\]",
    ),
    "down_bias": (lambda t: t[:3], r"down_bias must have shape \[4\], got shape \[3\]"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_shapes(device: str, name: str) -> None:
    spoil, text = FAULTS[name]
    leaves = leaves_of((5, 7), lambda s: torch.zeros(s, device=device))
    if name == "gate_weight":
        leaves["gate_bias"] = None
    with pytest.raises(RuntimeError, match=f"amp_ext::gated_mlp: {text}"):
        ops.gated_mlp(**leaves | {name: spoil(leaves[name])})
