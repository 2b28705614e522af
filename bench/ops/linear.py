"""Time fused layers: linear + bias + GELU, and an MLP: that layer and a second one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import amp_ext.nn
from amp_ext import ops
from harness import providers
from harness.bounds import compare
from harness.registry import (
    BF16,
    FP16,
    FP32,
    NAMES,
    Case,
    Op,
    Provider,
    Setup,
    Trial,
    Work,
    check,
)
from ops import gemm
from workloads.gemm_shapes import TOKENS, VIT_TOKENS, VIT_WIDTH

LINEAR, MLP = "linear+GELU", "MLP"


class Block(NamedTuple):
    """Size a layer of a kind, LINEAR or MLP, and its input [tokens, width]."""

    kind: str
    tokens: int
    width: int
    hidden: int

    @property
    def flops(self) -> int:
        """Count the products of a forward pass; a backward pass has twice as many."""
        return (2 if self.kind == LINEAR else 4) * self.tokens * self.width * self.hidden

    def layers(self, dtype: torch.dtype, device: torch.device) -> nn.Sequential:
        """Make the layers that torch computes one after the other."""
        torch.manual_seed(0)
        made = [nn.Linear(self.width, self.hidden), nn.GELU()]
        made += [nn.Linear(self.hidden, self.width)] if self.kind == MLP else []
        return nn.Sequential(*made).to(device, dtype)


def fused(layers: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Return amp_ext's layers with the parameters of `layers`."""
    first = layers[0]
    if len(layers) == 2:
        return lambda x: ops.linear(x, first.weight, first.bias, activation="gelu")
    options = {"device": first.weight.device, "dtype": first.weight.dtype, "activation": "gelu"}
    mlp = amp_ext.nn.MLP(first.in_features, first.out_features, **options)
    mlp.fc1, mlp.fc2 = first, layers[2]
    return mlp


def run_pass(
    module: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    x: Tensor,
    grad: Tensor | None,
) -> list[Tensor]:
    """Return the result, and with its `grad` the gradients of input and parameters."""
    if grad is None:
        with torch.no_grad():
            return [module(x)]
    out = module(x)
    return [out, *torch.autograd.grad(out, [x, *parameters], grad)]


def build(block: Block, dtype: torch.dtype, backward: bool, setup: Setup) -> Trial:
    """Make a trial where all providers have the same input and parameters."""
    layers = block.layers(dtype, setup.device)
    generator = torch.Generator(setup.device).manual_seed(0)
    outputs = block.width if block.kind == MLP else block.hidden
    x, grad = (
        torch.randn(block.tokens, n, device=setup.device, generator=generator).to(dtype)
        for n in (block.width, outputs)
    )
    x.requires_grad_(backward)
    parameters = list(layers.parameters())

    def run(module: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return run_pass(module, parameters, x, grad if backward else None)

    lines = providers.lines(fused(layers), layers, setup.device, products=True)

    def timed(provider: Provider) -> Provider:
        return replace(provider, launch=partial(run, provider.launch))

    @cache
    def expected() -> list[Tensor]:
        """Compute the result and the gradients in FP64."""
        exact = copy.deepcopy(layers).double()
        inputs = x.detach().double().requires_grad_(backward)
        return run_pass(
            exact, list(exact.parameters()), inputs, grad.double() if backward else None
        )

    names = ["result", "gradient of the input", *(name for name, _ in layers.named_parameters())]

    def verify(provider: Provider) -> None:
        name, results = provider.name, run(provider.launch)
        parts = names[: len(expected())]
        for part, exact, result in zip(parts, expected(), results, strict=True):
            check(result.dtype == dtype, f"{name}'s {part} is {result.dtype}")
            compare(result, exact.detach(), sum(block[1:]), dtype, f"{name}'s {part}")

    work = Work(flops=block.flops * (3 if backward else 1))
    return Trial(lines, verify, work, timed)


def blocks(setup: Setup) -> list[tuple[str, Block]]:
    """Return the MLPs of language models and of ViT-B, a fraction of one on a CPU."""
    sizes = [
        ("8B", TOKENS, 4096, 14336),
        ("1B", TOKENS, 2048, 8192),
        ("ViT-B", VIT_TOKENS, VIT_WIDTH, 4 * VIT_WIDTH),
    ]
    if setup.small:
        part, tokens = (32, 32) if setup.quick else (8, 256)
        sizes = [(f"1B at 1/{part}", tokens, 2048 // part, 8192 // part)]
    return [
        (f"{kind} {name}", Block(kind, *size)) for name, *size in sizes for kind in (LINEAR, MLP)
    ]


def cases(setup: Setup) -> list[Case]:
    return [
        Case(
            f"{NAMES[dtype]} {name}{', fwd+bwd' if backward else ', forward'}",
            partial(build, block, dtype, backward, setup),
            dtype=dtype,
        )
        for dtype in setup.dtypes(FP16, BF16, also=(FP32,))
        for name, block in blocks(setup)
        for backward in (False, True)
    ]


OP = Op(
    name="linear",
    notes="amp_ext's fused layers and torch's linear, GELU, linear one after the other, with "
    "parameters of the dtype named. fwd+bwd: a forward pass and the gradients of the input and of "
    "all parameters. GFLOP/s counts the products.",
    rate="GFLOP/s",
    host=False,
    limit=gemm.limit,
    cases=cases,
)
