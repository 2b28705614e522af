"""List the matrix products that are worth timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.registry import BF16, Setup, Work

LAYOUTS = ("NN", "NT", "TN")
TOKENS = 4096


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


@dataclass(frozen=True)
class Transformer:
    """Name a language model and the widths of its stream, of qkv and of the gated MLP."""

    name: str
    width: int
    qkv: int
    hidden: int

    def shapes(self, tokens: int, only: Sequence[str] = ("qkv", "attn out", "up", "down")):
        """Return its layers; up is the gate's layer too, in one product."""
        sizes = {
            "qkv": (self.qkv, self.width),
            "attn out": (self.width, self.width),
            "up": (2 * self.hidden, self.width),
            "down": (self.width, self.hidden),
        }
        return [s for n in only for s in layer(f"{self.name} {n}", tokens, *sizes[n])]


# The widths of Llama 3.2 1B, Llama 3 8B and 70B; ViT-B/16 with 64 images of 197 tokens.
BILLION_1 = Transformer("1B", 2048, 3072, 8192)
BILLION_8 = Transformer("8B", 4096, 6144, 14336)
BILLION_70 = Transformer("70B", 8192, 10240, 28672)
VIT_TOKENS, VIT_WIDTH = 64 * 197, 768


def large_shapes() -> list[Shape]:
    """Return the products for a GPU, the most wanted first."""
    vit = layer("ViT-B up", VIT_TOKENS, 4 * VIT_WIDTH, VIT_WIDTH)
    vit += layer("ViT-B down", VIT_TOKENS, VIT_WIDTH, 4 * VIT_WIDTH)
    head = layer("8B head", TOKENS, 128256, BILLION_8.width)[:2]
    skinny = [Shape(f"8B up, {m} tokens", m, 28672, 4096, "NT") for m in (1, 16, 128)]
    return [
        *squares((8192, 4096)),
        *BILLION_8.shapes(TOKENS),
        *BILLION_70.shapes(TOKENS, ("qkv", "up", "down")),
        *BILLION_1.shapes(TOKENS),
        *vit,
        *head,
        *skinny,
        *squares((2048, 1024)),
        *example_shapes(quick=False),
    ]


def example_shapes(quick: bool) -> list[Shape]:
    """Return the layers of the checkerboard, digits and regression networks."""
    pixels = 144 if quick else 9216
    return [
        *layer(f"{pixels}x256x256", pixels, 256, 256),
        *layer("64x784x256", 64, 256, 784)[:3],
        Shape("64x10x20 forward", 64, 20, 10, "NT"),
    ]


def scaled_shapes(quick: bool) -> list[Shape]:
    """Return language models and ViT at a fraction of their sizes, for a CPU."""
    part = 64 if quick else 8
    name, width = f"8B at 1/{part}", BILLION_8.width // part
    scaled = Transformer(name, width, BILLION_8.qkv // part, BILLION_8.hidden // part)
    tokens = TOKENS // (64 if quick else 16)
    vit_width = VIT_WIDTH // (16 if quick else 4)
    vit = layer(f"ViT-B up at 1/{VIT_WIDTH // vit_width}", 197, 4 * vit_width, vit_width)
    skinny = [Shape(f"{name} up, 1 token", 1, 2 * scaled.hidden, width, "NT")]
    skinny += [] if quick else [Shape("1x4096x4096", 1, 4096, 4096, "NT")]
    return [*scaled.shapes(tokens, ("up",)), *vit, *skinny]


def shapes(setup: Setup, dtype: torch.dtype) -> list[Shape]:
    """Return the product of the command line, or all; on a GPU fewer in BF16."""
    if setup.product:
        m, n, k, layout = setup.product
        return [Shape(f"{m}x{n}x{k}", m, n, k, layout)]
    if not setup.small and dtype == BF16 and setup.dtype is None:
        return squares((8192, 4096)) + BILLION_8.shapes(TOKENS)
    if not setup.small:
        return large_shapes()
    sizes = (128, 64) if setup.quick else (1024, 512)
    return squares(sizes) + example_shapes(setup.quick) + scaled_shapes(setup.quick)
