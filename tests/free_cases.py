"""A network of this package's layers, and what its scaler knows of its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import amp_ext
from amp_ext.nn import Linear

INF = torch.inf


class Training:
    """A network, a fused optimizer, and a scaler that takes the word of products."""

    def __init__(
        self, device: str = "cpu", network: nn.Module | None = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.device = device
        self.layer = Linear(6, 5, device=device) if network is None else network.to(device)
        self.x = torch.ones(4, 6, device=device)
        self.optimizer: Optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.5, fused=True)
        options = {"free_checks": True, **options}
        self.scaler = amp_ext.GradScaler(device, init_scale=4.0, **options)
        self.step()  # whose gradients are read: nobody has asked for verdicts before

    @property
    def grad(self) -> Tensor:
        return self.layer.weight.grad

    def loss(self) -> Tensor:
        with torch.autocast(self.device, torch.float16):
            out = self.layer(self.x)
        return self.scaler.scale(out.float().sum())

    def backward(self, **options: Any) -> None:
        self.loss().backward(**options)

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def spoil(self, row: int = -1) -> None:
        """Have the product write infinities to a row of the gradient, or to all of it."""
        out = self.layer(self.x) * 1.0
        factors = torch.ones_like(out)
        factors[:, slice(None) if row < 0 else row] = INF
        self.scaler.scale(out).backward(factors)

    def check(self, *params: Tensor) -> tuple[int, bool]:
        """Have the scaler check the gradients, by default those of the network; return how many
        verdicts it took, and whether it found an overflow."""
        optimizer = torch.optim.SGD(params, lr=0.5) if params else self.optimizer
        before = self.scaler._log._checked
        found = self.scaler._check_inf_per_device(optimizer)
        return self.scaler._log._checked - before, any(bool(flag) for flag in found.values())


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Have this package's kernels form products on a GPU."""
    before = amp_ext._C.uses_gemm_kernels()
    amp_ext._C.use_gemm_kernels(True)
    try:
        yield
    finally:
        amp_ext._C.use_gemm_kernels(before)
        amp_ext._C.judge_gradients(False)
