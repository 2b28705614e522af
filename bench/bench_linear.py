"""Fused layers: linear + bias + GELU as one product, and an MLP as one node of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_ext.nn
import providers
from bounds import Bounded
from gemm_shapes import BILLION_1, BILLION_8, TOKENS, VIT_TOKENS, VIT_WIDTH
from registry import (
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
)

LINEAR, MLP, NORM_MLP = "linear+GELU", "MLP", "norm+MLP"
APPROXIMATE = {LINEAR: "none", MLP: "none", NORM_MLP: "tanh"}  # TransformerEngine's is by tanh


@dataclass(frozen=True)
class Block:
    """A layer and its input [tokens, width].

    Args:
        kind: LINEAR, MLP or NORM_MLP.
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
    def approximate(self) -> str:
        return APPROXIMATE[self.kind]


class Layers(nn.Module):
    """The layers apart, as a network of torch's has them; parameters as torch initialises them."""

    def __init__(self, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.approximate = block.approximate
        if block.kind == NORM_MLP:
            self.norm = nn.LayerNorm(block.width, device=device, dtype=dtype)
        self.fc1 = nn.Linear(block.width, block.hidden, device=device, dtype=dtype)
        if block.kind != LINEAR:
            self.fc2 = nn.Linear(block.hidden, block.width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "norm"):
            x = self.norm(x)
        x = F.gelu(self.fc1(x), approximate=self.approximate)
        return self.fc2(x) if hasattr(self, "fc2") else x


class Fused(nn.Module):
    """amp_ext's layers, with the parameters of `Layers`."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        activation = "gelu_tanh" if layers.approximate == "tanh" else "gelu"
        sizes = layers.fc1.in_features, layers.fc1.out_features
        made = partial(
            amp_ext.nn.MLP if hasattr(layers, "fc2") else amp_ext.nn.Linear,
            *sizes,
            device=layers.fc1.weight.device,
            dtype=layers.fc1.weight.dtype,
            activation=activation,
        )
        self.norm = getattr(layers, "norm", nn.Identity())
        self.fused = made()
        if hasattr(layers, "fc2"):
            self.fused.fc1, self.fused.fc2 = layers.fc1, layers.fc2
        else:
            self.fused.weight, self.fused.bias = layers.fc1.weight, layers.fc1.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(self.norm(x))


class Pass:
    """A module and its input; one launch is a forward pass, with `backward` all gradients too."""

    def __init__(self, module: Callable[[Tensor], Tensor], parameters, x: Tensor, grad: Tensor):
        self.module, self.parameters = module, list(parameters)
        self.x, self.grad = x, grad

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.module(self.x)

    def backward(self) -> Sequence[Tensor]:
        """The result and the gradients of the input and of all parameters."""
        out = self.module(self.x)
        return out, *torch.autograd.grad(out, [self.x, *self.parameters], self.grad)


def te_module(library: providers.TransformerEngine, layers: Layers) -> nn.Module | None:
    """TransformerEngine's, with equal parameters; None for what it has no layer for."""
    if hasattr(layers, "norm"):
        return library.norm_mlp(layers.norm, layers.fc1, layers.fc2)
    if hasattr(layers, "fc2"):
        return None
    return nn.Sequential(library.linear(layers.fc1), nn.GELU())


def build(block: Block, dtype: torch.dtype, backward: bool, setup: Setup) -> Trial:
    """All providers have the same input; parameters are shared, or of the same values."""
    layers = Layers(block, dtype, setup.device)
    generator = torch.Generator(setup.device).manual_seed(0)
    outputs = block.hidden if block.kind == LINEAR else block.width
    x, grad = (
        torch.randn(block.tokens, n, device=setup.device, generator=generator).to(dtype)
        for n in (block.width, outputs)
    )
    x.requires_grad_(backward)
    modules: dict[str, tuple[Callable, Callable]] = {
        name: (Fused(layers), around)
        for name, around in providers.ours(setup.device, products=True).items()
    }
    modules[BASELINE] = layers, providers.nullcontext
    if setup.compiled and (program := compiled(layers, x, grad, backward)):
        modules[providers.COMPILE] = program, providers.nullcontext
    if (library := providers.transformer_engine(setup.device)) and (
        module := te_module(library, layers)
    ):
        modules[providers.TRANSFORMER_ENGINE] = module, providers.nullcontext
    passes = {
        name: (Pass(module, parameters_of(module, layers), x, grad), around)
        for name, (module, around) in modules.items()
    }

    def verify_all() -> None:
        expected = Expected(layers, x, grad)
        for name, (each, around) in passes.items():
            with around():
                results = each.backward() if backward else (each.forward(),)
            expected.compare(name, results)

    return Trial(
        tuple(
            Provider(name, each.backward if backward else each.forward, around=around)
            for name, (each, around) in passes.items()
        ),
        verify_all,
        Work(flops=block.flops * (3 if backward else 1)),
    )


def parameters_of(module: Callable, layers: Layers) -> list[Tensor]:
    """In the order of torch's, which TransformerEngine's norm, fc1 and fc2 follow too."""
    shared = isinstance(module, (Layers, Fused)) or not isinstance(module, nn.Module)
    return list((layers if shared else module).parameters())


def compiled(layers: Layers, x: Tensor, grad: Tensor, backward: bool) -> Callable | None:
    def run(program: Callable[[Tensor], Tensor]) -> None:
        once = Pass(program, layers.parameters(), x, grad)
        once.backward() if backward else once.forward()

    return providers.compiled(layers.forward, run)


class Expected:
    """The result and the gradients in FP64, with bounds for any order of roundings to 16 bits."""

    def __init__(self, layers: Layers, x: Tensor, grad: Tensor) -> None:
        self.layers, self.dtype = layers, x.dtype
        exact = Bounded.exact
        inputs = exact(x)
        self.through_norm: list[Tensor] = []
        if hasattr(layers, "norm"):
            inputs = exact(copy.deepcopy(layers.norm).double()(x.detach().double()))
            inputs = inputs.rounded(self.dtype)
            self.through_norm = norm_gradients(layers, x, grad)
        before = self.rounded(inputs @ exact(layers.fc1.weight).mT + exact(layers.fc1.bias))
        hidden = self.rounded(before.gelu(layers.approximate))
        given = exact(grad)
        second: list[Bounded] = []
        self.out = hidden
        if hasattr(layers, "fc2"):
            weight = exact(layers.fc2.weight)
            self.out = self.rounded(hidden @ weight.mT + exact(layers.fc2.bias))
            second = [given.mT @ hidden, given.column_sums()]
            given = self.rounded(given @ weight)
        given = self.rounded(given.times_gelu_derivative(before, layers.approximate))
        self.to_input = self.rounded(given @ exact(layers.fc1.weight))
        self.gradients = [given.mT @ inputs, given.column_sums(), *second]

    def rounded(self, value: Bounded) -> Bounded:
        return value if self.dtype == torch.float32 else value.rounded(self.dtype)

    def compare(self, name: str, results: Sequence[Tensor]) -> None:
        self.rounded(self.out).compare(results[0], f"{name}'s result")
        if len(results) == 1:
            return
        rest = list(results[1:])
        if self.through_norm:
            compare_through_norm(name, rest[:3], self.through_norm)
            rest = rest[3:]
        else:
            self.to_input.compare(rest.pop(0), f"{name}'s gradient of the input")
        check(len(rest) == len(self.gradients), f"{name} has {len(rest)} gradients")
        for place, (bounded, gradient) in enumerate(zip(self.gradients, rest, strict=True)):
            self.rounded(bounded).compare(gradient, f"{name}'s gradient of parameter {place}")


def norm_gradients(layers: Layers, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Of the input and the norm's weight and bias, in FP64."""
    double = copy.deepcopy(layers).double()
    inputs = x.detach().double().requires_grad_()
    wanted = [inputs, double.norm.weight, double.norm.bias]
    return list(torch.autograd.grad(double(inputs), wanted, grad.double()))


def compare_through_norm(
    name: str, gradients: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """As a whole: sixteen roundings to their dtype, of half a unit each, at the very most."""
    for what, mine, exact in zip(("input", "weight", "bias"), gradients, expected, strict=True):
        error = ((mine.double() - exact).norm() / exact.norm()).item()
        near = error <= 8 * torch.finfo(mine.dtype).eps
        check(near, f"{name}'s gradient of the norm's {what} is {error:.2g} off")


def limit(setup: Setup) -> Case:
    """torch's product of square matrices in the first dtype, nothing else."""
    size = 64 if setup.quick else 512 if setup.small else 4096
    dtype = (setup.dtypes(FP16, BF16, also=(FP32,)) or (FP16,))[0]

    def build_product() -> Trial:
        a, b = (torch.randn(size, size, device=setup.device).to(dtype) for _ in range(2))
        return Trial((Provider("torch", lambda: torch.mm(a, b.mT)),), work=Work(flops=2 * size**3))

    return Case(f"torch.mm {size}^3 NT {NAMES[dtype]}", build_product, limit=True)


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
    kinds = [LINEAR, MLP]
    if providers.transformer_engine(setup.device):
        kinds.append(NORM_MLP)
    return [(f"{kind} {name}", Block(kind, *size)) for name, *size in sizes for kind in kinds]


def cases(setup: Setup) -> list[Case]:
    return [
        Case(
            f"{NAMES[dtype]} {name}{', fwd+bwd' if backward else ', forward'}",
            partial(build, block, dtype, backward, setup),
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
