"""Test training with gradients of weights beyond FP16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ext
from amp_ext.nn import MLP, Linear, LinearActivation
from executors import Executor, against_oracle

FP16 = torch.float16
STEPS = 6


def network(name: str, device: torch.device) -> nn.Module:
    if name == "MLP":
        net: nn.Module = MLP(8, 8, 1, activation="relu", device=device)
    elif name == "Linear":
        first = LinearActivation(8, 8, activation="relu", device=device)
        net = nn.Sequential(first, Linear(8, 1, device=device))
    else:
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.125)
    return net


def train(
    device: torch.device, net: nn.Module, package: Any, passes: int = 1
) -> tuple[int, float, list[float]]:
    """Train on 4096 inputs of 1 to 32; return how often the scale fell, the largest gradient of a
    weight after unscaling, and the losses.

    A row of the last weight's gradient is a sum of 4096 products of a loss gradient of 1 and
    activations of about 16: some 65,536 times the scale's own power of two. Each product, and all
    that flows back, is well within FP16.
    """
    x = torch.arange(1.0, 33.0, device=device).repeat(128)[:, None].expand(-1, 8).contiguous()
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-26)
    scaler = package.GradScaler(device.type, init_scale=4.0, growth_interval=1000)
    largest, losses, falls = 0.0, [], 0
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(passes):
            with package.autocast(device.type, dtype=FP16):
                out = net(x)
            loss = out.float().sum()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in net.parameters():
            if parameter.dim() == 2:
                largest = max(largest, parameter.grad.abs().max().item())
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        falls += scaler.get_scale() < before
        losses.append(loss.item())
    return falls, largest, losses


@against_oracle
@pytest.mark.parametrize("name", ["nn.Linear", "Linear", "MLP"])
@pytest.mark.parametrize("passes", [1, 2])
def test_no_step_is_skipped(executor: Executor, passes: int, name: str) -> None:
    """amp_ext's training skips no step, and the loss falls."""
    net = network(name, executor.device)
    falls, largest, losses = train(executor.device, net, amp_ext, passes)
    assert falls == 0
    assert 65_504 < largest < float("inf")
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@against_oracle
def test_torch_skips(executor: Executor) -> None:
    """torch skips steps of the same network and data."""
    falls, _, losses = train(executor.device, network("nn.Linear", executor.device), torch.amp)
    assert falls >= 1
    assert losses[1] == losses[0]
