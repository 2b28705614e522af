"""Test that torch.utils.flop_counter counts the products as it counts torch's own."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import amp_ext
from amp_ext import ops

FP16 = torch.float16


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the counted operations by module."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


# ---- the ops -------------------------------------------------------------------------------------

M, N, K = 5, 7, 11
LEADING = [((), (), 1), ((2, 3), (2, 3), 6), ((3,), (), 3), ((), (3,), 3), ((0,), (0,), 0)]
"""Leading dimensions of a and b, and the number of products."""


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize(("of_a", "of_b", "batch"), LEADING)
def test_products(of_a: tuple[int, ...], of_b: tuple[int, ...], batch: int, trans: bool) -> None:
    a = torch.zeros(*of_a, *((K, M) if trans else (M, K)), device="meta")
    b = torch.zeros(*of_b, *((K, N) if trans else (N, K)), device="meta")
    trans = {"trans_a": trans, "trans_b": not trans}
    out = ops.gemm(a, b, **trans)
    calls = [
        lambda: ops.gemm(a, b, **trans, c=out, beta=0.5, out_dtype=FP16),
        lambda: ops.gemm_accumulate_(out, a, b, **trans),
    ]
    if of_a == of_b and of_a:
        calls.append(lambda: ops.gemm(a, b, **trans, sum_batch=True))
    for call in calls:
        assert counted(call).get("Global", 0) == batch * 2 * M * N * K


# ---- models --------------------------------------------------------------------------------------


class Net(nn.Module):
    """A network of layers and of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).relu())
        return (hidden @ hidden.mT).double().sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])  # tools measure on the latter
@pytest.mark.parametrize("kind", [None, torch.autocast, amp_ext.autocast])
def test_training_step(kind: Callable[..., Any] | None, device: str) -> None:
    """Products in a region count by module, forward and backward."""
    region = partial(kind, "cpu", FP16) if kind else contextlib.nullcontext

    def step(net: nn.Module, region: Callable[[], Any]) -> dict[str, int]:
        def run() -> None:
            with region():
                loss = net.to(device)(torch.zeros(2, 5, 5, device=device, requires_grad=True))
            loss.backward()

        return counted(run)

    net = Net()
    expected = step(net, contextlib.nullcontext)
    assert {"Net.first", "Net.second"} < expected.keys()
    assert step(net, region) == expected
