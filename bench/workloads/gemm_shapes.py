"""List the matrix products that are worth timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.registry import BF16, Setup, Work

LAYOUTS = ("NN", "NT", "TN")
TOKENS = 4096
VIT_TOKENS, VIT_WIDTH = 64 * 197, 768  # 64 images


@dataclass(frozen=True)
class Shape:
    """Describe a product out [m, n] = A [m, k] @ B [k, n].

    Args:
        name: of the product.
        m, n, k: sizes.
        layout: of A and B, "N" or "T" each; T is an operand that lies in memory as its transpose.
        out: dtype of amp_ext's result; None for the operands' own.
        accumulate: whether the product is added to a float32 [m, n].
    """

    name: str
    m: int
    n: int
    k: int
    layout: str
    out: torch.dtype | None = None
    accumulate: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def work(self, dtype: torch.dtype) -> Work:
        """Count the work for operands of a dtype; a sum that is added to is read too."""
        result = self.m * self.n * (self.out or dtype).itemsize * (1 + self.accumulate)
        operands = (self.m + self.n) * self.k * dtype.itemsize
        return Work(bytes=operands + result, flops=self.flops)

    def operands(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make A and B as they lie in memory: activations N(0, 1) and weights N(0, 1 / k)."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(self.m, self.k), (self.k, self.n)]
        stored = [s[::-1] if t == "T" else s for s, t in zip(shapes, self.layout, strict=True)]
        a, b = (torch.randn(s, device=device, generator=generator) for s in stored)
        return a.to(dtype), b.div_(self.k**0.5).to(dtype)

    def views(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B as torch.mm takes them."""
        return (a.t() if self.layout[0] == "T" else a), (b.t() if self.layout[1] == "T" else b)


def layer(name: str, tokens: int, outputs: int, inputs: int) -> list[Shape]:
    """Return a linear layer's products: forward, both gradients, and the weight's added."""
    weight_gradient = (outputs, inputs, tokens, "TN", torch.float32)
    return [
        Shape(f"{name} forward", tokens, outputs, inputs, "NT"),
        Shape(f"{name} dgrad", tokens, inputs, outputs, "NN"),
        Shape(f"{name} wgrad", *weight_gradient),
        Shape(f"{name} accumulate", *weight_gradient, accumulate=True),
    ]


def squares(sizes: Sequence[int]) -> list[Shape]:
    return [Shape(f"{size}^3", size, size, size, t) for size in sizes for t in LAYOUTS]


def transformer(name: str, tokens: int, width: int, qkv: int, hidden: int) -> list[Shape]:
    """Return a language model's layers; up is the gate's layer too, in one product."""
    return [
        *layer(f"{name} qkv", tokens, qkv, width),
        *layer(f"{name} attn out", tokens, width, width),
        *layer(f"{name} up", tokens, 2 * hidden, width),
        *layer(f"{name} down", tokens, width, hidden),
    ]


def billion_8() -> list[Shape]:
    return transformer("8B", TOKENS, 4096, 6144, 14336)


def large_shapes() -> list[Shape]:
    """Return the products for a GPU, the most wanted first.

    The widths are those of Llama 3.2 1B, Llama 3 8B and 70B, and of ViT-B/16.
    """
    return [
        *squares((8192, 4096)),
        *billion_8(),
        *transformer("70B", TOKENS, 8192, 10240, 28672),
        *transformer("1B", TOKENS, 2048, 3072, 8192),
        *layer("ViT-B up", VIT_TOKENS, 4 * VIT_WIDTH, VIT_WIDTH),
        *layer("ViT-B down", VIT_TOKENS, VIT_WIDTH, 4 * VIT_WIDTH),
        *layer("8B head", TOKENS, 128256, 4096)[:2],
        *(Shape(f"8B up, {m} tokens", m, 28672, 4096, "NT") for m in (1, 16, 128)),
        *squares((2048, 1024)),
        *example_shapes(pixels=9216),
    ]


def example_shapes(pixels: int) -> list[Shape]:
    """Return the layers of the checkerboard, digits and regression networks."""
    return [
        *layer(f"{pixels}x256x256", pixels, 256, 256),
        *layer("64x784x256", 64, 256, 784)[:3],
        Shape("64x10x20 forward", 64, 20, 10, "NT"),
    ]


def small_shapes(part: int, vit_part: int, tokens: int) -> list[Shape]:
    """Return layers of a language model and of ViT at a fraction of their widths, for a CPU."""
    name, width, up, vit = f"8B at 1/{part}", 4096 // part, 28672 // part, VIT_WIDTH // vit_part
    return [
        *layer(f"{name} up", tokens, up, width),
        *layer(f"ViT-B up at 1/{vit_part}", 197, 4 * vit, vit),
        Shape(f"{name} up, 1 token", 1, up, width, "NT"),
    ]


def shapes(setup: Setup, dtype: torch.dtype) -> list[Shape]:
    """Return the product of the command line, or all; on a GPU fewer in BF16."""
    if setup.product:
        m, n, k, layout = setup.product
        return [Shape(f"{m}x{n}x{k}", m, n, k, layout)]
    if setup.quick:
        return squares((128, 64)) + example_shapes(pixels=144) + small_shapes(64, 16, tokens=64)
    if not setup.on_gpu:
        skinny = Shape("1x4096x4096", 1, 4096, 4096, "NT")
        large = [*squares((1024, 512)), *example_shapes(pixels=9216)]
        return [*large, *small_shapes(8, 4, tokens=256), skinny]
    if dtype == BF16 and setup.dtype is None:
        return squares((8192, 4096)) + billion_8()
    return large_shapes()
