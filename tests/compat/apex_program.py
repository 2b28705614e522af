"""A program of Apex's amp, and the same one with amp_ext's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.compat.apex import amp
from twins import DEVICES as ALL_DEVICES

DEVICES = [device for device in ALL_DEVICES if isinstance(device, str)]
STEPS, OVERFLOW, MAX_NORM, LR = 6, 3, 0.5, 0.05

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=LR / 10, eps=1e-4),
    "torch.AdamW fused": lambda params: torch.optim.AdamW(params, lr=LR / 10, eps=1e-4, fused=True),
    "optim.AdamW": lambda params: amp_ext.optim.AdamW(params, lr=LR / 10, eps=1e-4),
}


class Net(nn.Module):
    """Two linear layers with batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        result = self.fc2(torch.relu(self.norm(hidden)))
        self.dtypes = [x.dtype, hidden.dtype, result.dtype]
        return result


def new(optimizer: str = "torch.SGD", device: str = "cpu") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(device)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batches(device: str = "cpu", steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = (torch.randn(32, n, generator=generator) for n in (8, 4))
        yield x.to(device), y.to(device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, overflow: bool = False) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    return loss * float("inf") if overflow else loss


def train_apex(
    model: nn.Module, optimizer: Any, data: Any, overflow: int | None = None, first: int = 0
) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(data, first):
        optimizer.zero_grad()
        loss = loss_of(model, x, y, step == overflow)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plain(
    model: nn.Module, optimizer: Any, data: Any, scaler: Any, overflow: int | None = None
) -> list[float]:
    """Train with amp_ext's own names, in float32 with a disabled scaler."""
    losses, device = [], next(model.parameters()).device.type
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        with amp_ext.autocast(device, torch.float16, enabled=scaler.is_enabled()):
            loss = loss_of(model, x, y, step == overflow)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
