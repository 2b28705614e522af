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
every_device = pytest.mark.parametrize("device", ["cpu", "meta"])  # tools measure on the latter


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the counted operations by module."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


# ---- the ops -------------------------------------------------------------------------------------

BATCH, M, N, K = 3, 5, 7, 11
PRODUCT = 2 * M * N * K


def matrices(batch: tuple[int, ...], rows: int, columns: int, swap: bool, device: str) -> Tensor:
    shape = (*batch, columns, rows) if swap else (*batch, rows, columns)
    return torch.zeros(shape, device=device)


LEADING = {
    "one": ((), (), 1),
    "batch": ((2, BATCH), (2, BATCH), 2 * BATCH),
    "shared b": ((BATCH,), (), BATCH),
    "shared a": ((), (BATCH,), BATCH),
    "empty": ((0,), (0,), 0),
}


@every_device
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("leading", LEADING)
def test_products(leading: str, trans: bool, device: str) -> None:
    of_a, of_b, batch = LEADING[leading]
    a = matrices(of_a, M, K, trans, device)
    b = matrices(of_b, K, N, not trans, device)
    trans = {"trans_a": trans, "trans_b": not trans}
    out = ops.gemm(a, b, **trans)
    calls = [
        lambda: ops.gemm(a, b, **trans, c=out, beta=0.5, out_dtype=FP16),
        lambda: ops.gemm_with_aux(a, b, **trans, activation="gelu"),
        lambda: ops.gemm_times_derivative(a, b, out, **trans, activation="gelu"),
        lambda: ops.gemm_accumulate_(out, a, b, **trans),
    ]
    if of_a == of_b and of_a:
        total = out.new_zeros(M, N)
        calls += [
            lambda: ops.gemm(a, b, **trans, sum_batch=True),
            lambda: ops.gemm_accumulate_(total, a, b, **trans, sum_batch=True),
        ]
    for call in calls:
        assert counted(call).get("Global", 0) == batch * PRODUCT


@every_device
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("rows", [(), (2, 3)], ids=str)
def test_layers_without_modules(
    rows: tuple[int, ...], mode: Callable[[], Any], device: str
) -> None:
    """Layers without modules count once, as an op or as its products."""
    made = {"device": device}
    x, weight1, weight2 = (
        torch.zeros(s, **made, requires_grad=True) for s in ((*rows, 5), (7, 5), (3, 7))
    )
    bias1, bias2 = torch.zeros(7, **made), torch.zeros(3, **made)
    gate = torch.zeros(7, 5, **made)
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


class LinearActivation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class Net(nn.Module):
    """A network of layers of amp_ext or torch, and of ops routed by a region."""

    def __init__(self, linear: Any, fused: Any, mlp: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(5, 6), fused(6, 8), mlp(8, 16, 4)
        self.pointwise = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.third(self.second(self.first(x)))
        scores = torch.baddbmm(hidden.mean(), hidden, hidden.mT) + hidden @ hidden.mT
        mixed = torch.einsum("bij,kj->bik", scores, self.first.weight)
        return self.pointwise(scores[:, None].expand(-1, 3, -1, -1)).sum() + mixed.sum()


@every_device
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

    theirs = Net(nn.Linear, LinearActivation, MLP).to(device)
    ours = Net(amp_ext.nn.Linear, amp_ext.nn.LinearActivation, amp_ext.nn.MLP).to(device)
    expected = counted(lambda: step(theirs, None))
    assert {"Net.first", "Net.second", "Net.third.fc1", "Net.third.fc2"} < expected.keys()
    assert counted(lambda: step(ours, region)) == expected
    assert counted(lambda: step(theirs, region)) == expected


@every_device
def test_second_pass_with_accumulated_gradients(device: str) -> None:
    layer = amp_ext.nn.Linear(5, 6, device=device)
    x = torch.zeros(4, 5, device=device)
    for _ in range(2):
        assert counted(lambda: layer(x).sum().backward())["Global"] == 2 * 2 * 4 * 5 * 6
