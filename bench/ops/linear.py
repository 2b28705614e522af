"""Fused layers: linear + bias + GELU as one product, and an MLP as one node of the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_ext.nn
from amp_ext import ops
from harness import providers
from harness.bounds import Bounded, compare_norms
from harness.registry import (
    BASELINE,
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
    faults,
)
from workloads.gemm_shapes import BILLION_1, BILLION_8, TOKENS, VIT_TOKENS, VIT_WIDTH

LINEAR, MLP = "linear+GELU", "MLP"


@dataclass(frozen=True)
class Block:
    """A layer and its input [tokens, width].

    Args:
        kind: LINEAR or MLP.
        tokens, width, hidden: sizes; a linear layer's output is [tokens, hidden].
    """

    kind: str
    tokens: int
    width: int
    hidden: int

    @property
    def flops(self) -> int:
        """Of the products of one forward pass; a backward pass has twice as many."""
        products = 1 if self.kind == LINEAR else 2
        return products * 2 * self.tokens * self.width * self.hidden

    @property
    def has_second(self) -> bool:
        """Whether a linear layer back to the width follows."""
        return self.kind != LINEAR


class Layers(nn.Module):
    """The layers apart, as a network of torch's has them; parameters as torch initialises them."""

    def __init__(self, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = block
        self.fc1 = nn.Linear(block.width, block.hidden, device=device, dtype=dtype)
        if block.has_second:
            self.fc2 = nn.Linear(block.hidden, block.width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x))
        return self.fc2(x) if self.block.has_second else x


class Fused(nn.Module):
    """amp_ext's layers, with the parameters of `Layers`."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        block, weight = layers.block, layers.fc1.weight
        if block.has_second:
            options = {"device": weight.device, "dtype": weight.dtype, "activation": "gelu"}
            self.fused = amp_ext.nn.MLP(block.width, block.hidden, **options)
            self.fused.fc1, self.fused.fc2 = layers.fc1, layers.fc2
        else:
            bias = layers.fc1.bias
            self.fused = lambda x: ops.linear(x, weight, bias, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


@dataclass(frozen=True)
class Variant:
    """One implementation of the layers.

    Args:
        module: computes them.
        parameters: whose gradients it computes, in the order of those of `Layers`.
        around: the context in which it does.
    """

    module: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    around: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Pass:
    """What a launch does: a forward pass, and with `grad`, the result's, a backward pass too."""

    variant: Variant
    x: Tensor
    grad: Tensor | None

    def run(self) -> list[Tensor]:
        """The result; with `grad` also the gradients of the input and of all parameters."""
        module, parameters = self.variant.module, self.variant.parameters
        if self.grad is None:
            with torch.no_grad():
                return [module(self.x)]
        out = module(self.x)
        return [out, *torch.autograd.grad(out, [self.x, *parameters], self.grad)]


def build(block: Block, dtype: torch.dtype, backward: bool, setup: Setup) -> Trial:
    """All providers have the same input; parameters are shared, or of the same values."""
    layers = Layers(block, dtype, setup.device)
    shared = list(layers.parameters())
    generator = torch.Generator(setup.device).manual_seed(0)
    outputs = block.width if block.has_second else block.hidden
    x, grad = (
        torch.randn(block.tokens, n, device=setup.device, generator=generator).to(dtype)
        for n in (block.width, outputs)
    )
    x.requires_grad_(backward)
    passes: dict[str, Pass] = {}

    def pass_of(variant: Variant) -> Pass:
        return Pass(variant, x, grad if backward else None)

    def provider(name: str, make: Callable[[], Variant]) -> Provider:
        each = passes[name] = pass_of(make())
        return Provider(name, each.run, around=each.variant.around)

    def run_program(program: Callable[[Tensor], Tensor]) -> None:
        pass_of(Variant(program, shared)).run()

    makers: dict[str, Callable[[], Variant]] = {
        name: partial(Variant, Fused(layers), shared, around)
        for name, around in providers.ours(setup.device, products=True).items()
    }
    makers[BASELINE] = partial(Variant, layers, shared)
    if setup.compiled and (program := providers.compiled(layers.forward, run_program)):
        makers[providers.COMPILE] = partial(Variant, program, shared)

    def verify(names: Collection[str]) -> dict[str, str]:
        expected = Expected(layers, x, grad)

        def run(name: str) -> None:
            with passes[name].variant.around():
                results = passes[name].run()
            expected.compare(name, results)

        return faults({name: partial(run, name) for name in names})

    return Trial(
        tuple(
            providers.guarded(name, partial(provider, name, make)) for name, make in makers.items()
        ),
        verify,
        Work(flops=block.flops * (3 if backward else 1)),
    )


class Expected:
    """The result and the gradients in FP64, with bounds for any order of roundings to 16 bits."""

    def __init__(self, layers: Layers, x: Tensor, grad: Tensor) -> None:
        block, exact = layers.block, Bounded.exact
        self.dtype = x.dtype
        self.terms = block.tokens + block.width + block.hidden
        inputs = exact(x)
        before = self.rounded(inputs @ exact(layers.fc1.weight).mT + exact(layers.fc1.bias))
        hidden = self.rounded(before.gelu())
        given = exact(grad)
        second: list[Bounded] = []
        self.out = hidden
        if block.has_second:
            weight = exact(layers.fc2.weight)
            self.out = self.rounded(hidden @ weight.mT + exact(layers.fc2.bias))
            second = [given.mT @ hidden, given.column_sums()]
            given = self.rounded(given @ weight)
        given = self.rounded(given.times_gelu_derivative(before))
        self.to_input = self.rounded(given @ exact(layers.fc1.weight))
        first = [given.mT @ inputs, given.column_sums()]
        self.gradients = [self.rounded(each) for each in (*first, *second)]

    def rounded(self, value: Bounded) -> Bounded:
        return value if self.dtype == torch.float32 else value.rounded(self.dtype)

    def compare(self, name: str, results: Sequence[Tensor]) -> None:
        """Raise CheckError unless the result, and the gradients if there are any, are near."""
        self.compare_one(self.out, results[0], f"{name}'s result")
        if len(results) == 1:
            return
        self.compare_one(self.to_input, results[1], f"{name}'s gradient of the input")
        rest = results[2:]
        check(len(rest) == len(self.gradients), f"{name} has {len(rest)} gradients")
        for place, (bounded, gradient) in enumerate(zip(self.gradients, rest, strict=True)):
            self.compare_one(bounded, gradient, f"{name}'s gradient of parameter {place}")

    def compare_one(self, bounded: Bounded, result: Tensor, title: str) -> None:
        """Each element, to a bound that grows with every product; and blocks, in norm."""
        check(result.dtype == self.dtype, f"{title} is {result.dtype}")
        bounded.compare(result, title)
        compare_norms(result, bounded.value, self.terms, title)


def limit(setup: Setup) -> Case:
    """torch's product of square matrices in the first dtype, nothing else."""
    size = 64 if setup.quick else 512 if setup.small else 4096
    dtype = (setup.dtypes(FP16, BF16, also=(FP32,)) or (FP16,))[0]

    def build_product() -> Trial:
        a, b = (torch.randn(size, size, device=setup.device).to(dtype) for _ in range(2))
        return Trial((Provider(BASELINE, lambda: torch.mm(a, b.mT)),), work=Work(flops=2 * size**3))

    return Case(f"torch.mm {size}^3 NT {NAMES[dtype]}", build_product, dtype=dtype, limit=True)


def blocks(setup: Setup) -> list[tuple[str, Block]]:
    """The MLPs of ViT-B and of language models, of which a CPU gets a fraction."""
    if setup.small:
        part = 32 if setup.quick else 8
        width, hidden = 2048 // part, 8192 // part
        sizes = [(f"1B at 1/{part}", 32 if setup.quick else 256, width, hidden)]
    else:
        sizes = [
            ("8B", TOKENS, BILLION_8.width, BILLION_8.hidden),
            ("1B", TOKENS, BILLION_1.width, BILLION_1.hidden),
            ("ViT-B", VIT_TOKENS, VIT_WIDTH, 4 * VIT_WIDTH),
        ]
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
    notes=(
        "amp_ext's fused layers and torch's linear, GELU, linear apart, with parameters of the "
        "dtype named; inputs are the same ones every time. fwd+bwd: a forward pass and the "
        "gradients of the input and of all parameters. GFLOP/s counts the products.",
    ),
    rate="GFLOP/s",
    host=False,
    limit=limit,
    cases=cases,
)
