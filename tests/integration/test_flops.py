"""Test that torch.utils.flop_counter counts the products as it counts torch's own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_ext
import amp_ext.nn
from amp_ext import ops

FP16 = torch.float16


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the counted operations by module."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


# ---- the ops -------------------------------------------------------------------------------------

M, N, K = 5, 7, 11
LEADING = {
    "one": ((), (), 1),
    "batch": ((2, 3), (2, 3), 6),
    "shared b": ((3,), (), 3),
    "shared a": ((), (3,), 3),
    "empty": ((0,), (0,), 0),
}


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("leading", LEADING)
def test_products(leading: str, trans: bool) -> None:
    of_a, of_b, batch = LEADING[leading]
    a = torch.zeros(*of_a, *((K, M) if trans else (M, K)), device="meta")
    b = torch.zeros(*of_b, *((K, N) if trans else (N, K)), device="meta")
    trans = {"trans_a": trans, "trans_b": not trans}
    out = ops.gemm(a, b, **trans)
    calls = [
        lambda: ops.gemm(a, b, **trans, c=out, beta=0.5, out_dtype=FP16),
        lambda: ops.gemm_with_aux(a, b, **trans, activation="gelu"),
        lambda: ops.gemm_times_derivative(a, b, out, **trans, activation="gelu"),
        lambda: ops.gemm_accumulate_(out, a, b, **trans),
    ]
    if of_a == of_b and of_a:
        calls.append(lambda: ops.gemm(a, b, **trans, sum_batch=True))
    for call in calls:
        assert counted(call).get("Global", 0) == batch * 2 * M * N * K


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("rows", [(), (2, 3)], ids=str)
def test_layers_without_modules(rows: tuple[int, ...], mode: Callable[[], Any]) -> None:
    """Layers without modules count once, as an op or as its products."""
    x, weight1, weight2 = (
        torch.zeros(shape, requires_grad=True) for shape in ((*rows, 5), (7, 5), (3, 7))
    )
    bias1, bias2, gate = torch.zeros(7), torch.zeros(3), torch.zeros(7, 5)
    with mode():
        linear = counted(lambda: ops.linear(x, weight1, bias1, activation="gelu"))
        mlp = counted(lambda: ops.mlp(x, weight1, bias1, weight2, bias2))
        gated = counted(lambda: ops.gated_mlp(x, gate, None, weight1, bias1, weight2, bias2))
    count = math.prod(rows)
    assert linear == {"Global": 2 * count * 5 * 7}
    assert mlp == {"Global": 2 * count * (5 * 7 + 7 * 3)}
    assert gated == {"Global": 2 * count * (2 * 5 * 7 + 7 * 3)}


# ---- models --------------------------------------------------------------------------------------


class MLP(nn.Module):
    """The network of amp_ext.nn.MLP as torch's layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Net(nn.Module):
    """A network of layers of amp_ext or torch, and of ops routed by a region."""

    def __init__(self, linear: Any, mlp: Any) -> None:
        super().__init__()
        self.first, self.second = linear(5, 8), mlp(8, 16, 4)
        self.pointwise = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        scores = torch.baddbmm(hidden.mean(), hidden, hidden.mT) + hidden @ hidden.mT
        mixed = torch.einsum("bij,kj->bik", scores, self.first.weight)
        return self.pointwise(scores[:, None].expand(-1, 3, -1, -1)).sum() + mixed.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])  # tools measure on the latter
@pytest.mark.parametrize("region", [None, torch.autocast, amp_ext.autocast])
def test_training_step(region: Callable[..., Any] | None, device: str) -> None:
    """A training step counts by module, forward and backward.

    The network has layers of amp_ext, or torch's layers in a region.
    """

    def step(net: nn.Module, region: Callable[..., Any] | None) -> None:
        x = torch.zeros(2, 5, 5, device=device, requires_grad=True)
        with region("cpu", dtype=FP16) if region else contextlib.nullcontext():
            out = net(x)
        out.double().backward()

    theirs = Net(nn.Linear, MLP).to(device)
    ours = Net(amp_ext.nn.Linear, amp_ext.nn.MLP).to(device)
    expected = counted(lambda: step(theirs, None))
    assert {"Net.first", "Net.second.fc1", "Net.second.fc2"} < expected.keys()
    assert counted(lambda: step(ours, region)) == expected
    assert counted(lambda: step(theirs, region)) == expected
