"""Time linear layers with a bias, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


class Layer(NamedTuple):
    """Size a layer and its input [tokens, width]."""

    tokens: int
    width: int
    outputs: int

    @property
    def flops(self) -> int:
        """Count the product of a forward pass; a backward pass has twice as many."""
        return 2 * self.tokens * self.width * self.outputs


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


def build(layer: Layer, dtype: torch.dtype, backward: bool, setup: Setup) -> Trial:
    """Make a trial where all providers have the same input and parameters."""
    torch.manual_seed(0)
    theirs = nn.Linear(layer.width, layer.outputs).to(setup.device, dtype)
    generator = torch.Generator(setup.device).manual_seed(0)
    x, grad = (
        torch.randn(layer.tokens, n, device=setup.device, generator=generator).to(dtype)
        for n in (layer.width, layer.outputs)
    )
    x.requires_grad_(backward)
    parameters = list(theirs.parameters())

    def run(module: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return run_pass(module, parameters, x, grad if backward else None)

    def ours(x: Tensor) -> Tensor:
        return ops.gemm(x, theirs.weight, trans_b=True, bias=theirs.bias)

    lines = providers.lines(ours, theirs, setup.device, products=True)

    def timed(provider: Provider) -> Provider:
        return replace(provider, launch=partial(run, provider.launch))

    @cache
    def expected() -> list[Tensor]:
        """Compute the result and the gradients in FP64."""
        exact = copy.deepcopy(theirs).double()
        inputs = x.detach().double().requires_grad_(backward)
        return run_pass(
            exact, list(exact.parameters()), inputs, grad.double() if backward else None
        )

    names = ["result", "gradient of the input", *(name for name, _ in theirs.named_parameters())]

    def verify(provider: Provider) -> None:
        name, results = provider.name, run(provider.launch)
        parts = names[: len(expected())]
        for part, exact, result in zip(parts, expected(), results, strict=True):
            check(result.dtype == dtype, f"{name}'s {part} is {result.dtype}")
            compare(result, exact.detach(), sum(layer), dtype, f"{name}'s {part}")

    work = Work(flops=layer.flops * (3 if backward else 1))
    return Trial(lines, verify, work, timed)


def layers(setup: Setup) -> list[tuple[str, Layer]]:
    """Return the first layers of MLPs of language models and ViT-B, a part of one on a CPU."""
    sizes = [
        ("8B", TOKENS, 4096, 14336),
        ("1B", TOKENS, 2048, 8192),
        ("ViT-B", VIT_TOKENS, VIT_WIDTH, 4 * VIT_WIDTH),
    ]
    if setup.small:
        part, tokens = (32, 32) if setup.quick else (8, 256)
        sizes = [(f"1B at 1/{part}", tokens, 2048 // part, 8192 // part)]
    return [(name, Layer(*size)) for name, *size in sizes]


def cases(setup: Setup) -> list[Case]:
    return [
        Case(
            f"{NAMES[dtype]} {name}{', fwd+bwd' if backward else ', forward'}",
            partial(build, layer, dtype, backward, setup),
            dtype=dtype,
        )
        for dtype in setup.dtypes(FP16, BF16, also=(FP32,))
        for name, layer in layers(setup)
        for backward in (False, True)
    ]


OP = Op(
    name="linear",
    notes="amp_ext.ops.gemm with a bias and torch's linear, with parameters of the dtype named. "
    "fwd+bwd: a forward pass and the gradients of input, weight and bias. GFLOP/s counts products.",
    rate="GFLOP/s",
    host=False,
    limit=gemm.limit,
    cases=cases,
)
