"""gemm: matrix products of 16-bit operands, accumulated in FP32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import cublaslt
from amp_ext import ops
from amp_ext._library import _C
from registry import BASELINE, OURS, Case, Op, Provider, Trial, check

FP32 = "fp32"
CUBLASLT = "cublaslt"
KERNEL = "kernel"
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
LAYOUTS = ("NN", "NT", "TN")
HOPELESS_FLOPS = 2**32


@dataclass(frozen=True)
class Shape:
    """out [m, n] = A [m, k] @ B [k, n].

    Args:
        name: what the product is.
        layout: "NN", "NT" or "TN"; T is an operand that lies in memory as its transpose.
        out: dtype of amp_ext's result; the operands' own when None.
    """

    name: str
    m: int
    n: int
    k: int
    layout: str
    out: torch.dtype | None = None

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def operands(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """A and B as they lie in memory: activations N(0, 1) and weights N(0, 1 / k)."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(self.m, self.k), (self.k, self.n)]
        stored = [s[::-1] if t == "T" else s for s, t in zip(shapes, self.layout, strict=True)]
        a, b = (torch.randn(s, device=device, generator=generator) for s in stored)
        return a.to(dtype), b.div_(self.k**0.5).to(dtype)

    def views(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A and B as torch.mm takes them."""
        return (a.t() if self.layout[0] == "T" else a), (b.t() if self.layout[1] == "T" else b)


def ours(shape: Shape, a: Tensor, b: Tensor) -> Tensor:
    trans_a, trans_b = (letter == "T" for letter in shape.layout)
    return ops.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=shape.out)


def by_kernel(shape: Shape, a: Tensor, b: Tensor) -> Tensor:
    """amp_ext's CUDA kernel, which serves only those who ask for it."""
    before = _C.gemm_source()
    _C.set_gemm_source(_C.GemmSource.kernel)
    try:
        return ours(shape, a, b)
    finally:
        _C.set_gemm_source(before)


def torch_is_hopeless(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one product of torch's takes tens of seconds: a large one of FP16, NN, on a CPU."""
    slow = device.type == "cpu" and dtype == torch.float16 and shape.layout == "NN"
    return slow and shape.flops >= HOPELESS_FLOPS


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trial:
    """All providers multiply the same values; FP32's operands lie as the 16-bit ones do."""
    a, b = shape.operands(dtype, device)
    low, wide = shape.views(a, b), shape.views(a.float(), b.float())
    providers = [Provider(OURS, lambda: ours(shape, a, b))]
    if not torch_is_hopeless(shape, dtype, device):
        providers.append(Provider(BASELINE, lambda: torch.mm(*low)))
    providers.append(Provider(FP32, lambda: torch.mm(*wide)))
    if device.type == "cuda":
        providers.append(Provider(KERNEL, lambda: by_kernel(shape, a, b)))
        out = torch.empty(shape.m, shape.n, dtype=shape.out or dtype, device=device)
        providers.append(Provider(CUBLASLT, cublaslt.fastest(*low, out)))
    return Trial(tuple(providers), lambda: verify(shape, a, b), flops=shape.flops)


def verify(shape: Shape, a: Tensor, b: Tensor) -> None:
    """amp_ext's result is as near to the product in FP64 as FP32 sums, rounded once, must be.

    A sum of k exact products carries k - 1 roundings to FP32; a 16-bit result one more, of half a
    unit in the last place.
    """
    for multiply in (ours, by_kernel) if a.is_cuda else (ours,):
        verify_result(shape, a, b, multiply(shape, a, b))


def verify_result(shape: Shape, a: Tensor, b: Tensor, result: Tensor) -> None:
    """Raise CheckError unless the result is near enough."""
    left, right = shape.views(a.double(), b.double())
    exact, magnitude = left @ right, left.abs() @ right.abs()
    bound = shape.k * 2.0**-24 * magnitude
    if result.dtype in NAMES:
        info = torch.finfo(result.dtype)
        bound += (info.eps / 2 * (exact.abs() + bound)).clamp_(min=info.tiny * info.eps / 2)
    worst = ((result.double() - exact).abs() / bound).max().item()
    check(worst <= 1, f"an element is {worst:.2f} times as far from the exact product as it may be")


def limit(device: torch.device, quick: bool) -> Case:
    """torch's FP32 product of square matrices."""
    size = 128 if quick else 2048

    def build_product() -> Trial:
        shape = Shape("", size, size, size, "NN")
        a, b = shape.operands(torch.float32, device)
        return Trial((Provider(FP32, lambda: torch.mm(a, b)),), flops=shape.flops)

    return Case(f"limit: torch.mm {size}^3 NN fp32", build_product)


def large_shapes() -> list[Shape]:
    """Squares, and 4096 tokens through the layers of a language model with 7 billion parameters."""
    layers = {"qkv": (12288, 4096), "attention out": (4096, 4096)}
    layers |= {"up": (11008, 4096), "down": (4096, 11008), "head": (32000, 4096)}
    tokens = 4096
    made = [Shape(f"{size}^3", size, size, size, t) for size in (8192, 4096) for t in LAYOUTS]
    for name, (outputs, inputs) in layers.items():
        made += [
            Shape(f"{name} forward", tokens, outputs, inputs, "NT"),
            Shape(f"{name} dgrad", tokens, inputs, outputs, "NN"),
            Shape(f"{name} wgrad", outputs, inputs, tokens, "TN", out=torch.float32),
        ]
    return made


def small_shapes(quick: bool) -> list[Shape]:
    """Squares, and the layers of the checkerboard, digits and regression networks."""
    squares, pixels = ((128, 64), 144) if quick else ((2048, 1024), 9216)
    fp32 = torch.float32
    layers = [
        Shape(f"{pixels}x256x256 forward", pixels, 256, 256, "NT"),
        Shape(f"{pixels}x256x256 dgrad", pixels, 256, 256, "NN"),
        Shape(f"{pixels}x256x256 wgrad", 256, 256, pixels, "TN", out=fp32),
        Shape("64x784x256 forward", 64, 256, 784, "NT"),
        Shape("64x784x256 dgrad", 64, 784, 256, "NN"),
        Shape("64x784x256 wgrad", 256, 784, 64, "TN", out=fp32),
        Shape("64x10x20 forward", 64, 20, 10, "NT"),
    ]
    return [Shape(f"{n}^3", n, n, n, t) for n in squares for t in LAYOUTS] + layers


def cases(device: torch.device, quick: bool) -> list[Case]:
    shapes = small_shapes(quick)
    baseline = BASELINE
    if device.type == "cuda":
        shapes += [] if quick else large_shapes()
        baseline = CUBLASLT
    made = []
    for dtype, name in NAMES.items():
        for shape in shapes:
            hopeless = torch_is_hopeless(shape, dtype, device)
            words = f"{name} {shape.name} {shape.layout}{' (to fp32)' if hopeless else ''}"
            trial = partial(build, shape, dtype, device)
            made.append(Case(words, trial, not hopeless, FP32 if hopeless else baseline))
    return made


OP = Op(
    name="gemm",
    notes=(
        "Square sizes, or batch x inputs x outputs of a layer; N and T say which operands lie "
        "transposed in memory. torch is torch.mm in the operands' dtype, fp32 torch.mm on FP32 "
        "operands. amp_ext's wgrad results are FP32, torch's have 16 bits. Nothing is subtracted.",
        "torch's FP16 product of 2048^3 NN takes tens of seconds on a CPU and is not run there: "
        "that ratio is fp32's time over amp_ext's, and not in the mean.",
        "On a GPU ratios are to cublaslt: the fastest of the algorithms that cuBLASLt's heuristics "
        "name, into amp_ext's dtype.",
    ),
    rate="GFLOP/s",
    host=False,
    limit=limit,
    cases=cases,
)
