"""gemm: matrix products of 16-bit operands, accumulated in FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import cublaslt
import providers
from amp_ext import ops
from bounds import UNIT, Bounded, compare_products
from gemm_shapes import Shape, shapes
from lists import rotated
from registry import BASELINE, BF16, FP16, NAMES, Case, Op, Provider, Setup, Trial

FP32_LINE = "fp32"
CUBLASLT = "cublaslt"
HOPELESS_FLOPS = 2**31  # as many take torch seconds, in FP16, NN, on a CPU
FP32_FLOPS = 2**37  # larger ones are not worth a GPU's time in FP32


class Operands(NamedTuple):
    """A and B as they lie in memory, and what a product is added to."""

    a: Tensor
    b: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Operands:
        a, b = shape.operands(dtype, device)
        return cls(a, b, torch.randn(shape.m, shape.n, device=device) if shape.accumulate else None)

    def clone(self) -> Operands:
        return Operands(*(None if tensor is None else tensor.clone() for tensor in self))

    def widened(self) -> Operands:
        """FP32's own: a and b lie as the 16-bit ones do."""
        return Operands(self.a.float(), self.b.float(), self.c)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)


Launch = Callable[[Shape, Operands], Tensor]


def ours(shape: Shape, given: Operands) -> Tensor:
    trans_a, trans_b = (letter == "T" for letter in shape.layout)
    a, b, c = given
    if c is not None:
        ops.gemm_accumulate_(c, a, b, trans_a=trans_a, trans_b=trans_b)
        return c
    return ops.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=shape.out)


def theirs(shape: Shape, given: Operands) -> Tensor:
    """As torch.autocast forms an FP32 gradient: a product in 16 bits, then cast or added."""
    product = torch.mm(*shape.views(given.a, given.b))
    if given.c is not None:
        return given.c.add_(product)
    return product.to(shape.out or product.dtype)


def in_fp32(shape: Shape, given: Operands) -> Tensor:
    a, b = shape.views(given.a, given.b)
    return torch.mm(a, b) if given.c is None else given.c.addmm_(a, b)


def torch_is_hopeless(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one product of torch's takes seconds: a large one of FP16, NN, on a CPU."""
    slow = device.type == "cpu" and dtype == FP16 and shape.layout == "NN"
    return slow and shape.flops >= HOPELESS_FLOPS


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trial:
    """All providers multiply the same values, each into results of its own."""
    given = Operands.of(shape, dtype, device)
    made: dict[str, tuple[Launch, Callable]] = {
        name: (ours, around) for name, around in providers.ours(device, products=True).items()
    }
    if not torch_is_hopeless(shape, dtype, device):
        made[BASELINE] = theirs, providers.nullcontext
    sets = rotated(given, given.bytes, Operands.clone, device)

    def provider(name: str, launch: Launch, around: Callable, sets: list[Operands]) -> Provider:
        turns = itertools.cycle(sets)
        return Provider(name, lambda: launch(shape, next(turns)), around=around)

    lines = [provider(name, *line, sets) for name, line in made.items()]
    if device.type == "cpu" or shape.flops <= FP32_FLOPS:
        made[FP32_LINE] = in_fp32, providers.nullcontext
        wide = rotated(given.widened(), 2 * given.bytes, Operands.clone, device)
        lines.append(provider(FP32_LINE, *made[FP32_LINE], wide))
    if device.type == "cuda":
        made[CUBLASLT] = partial(by_cublaslt, dtype), providers.nullcontext
        launches = itertools.cycle(cublaslt_launches(shape, dtype, sets))
        lines.append(Provider(CUBLASLT, lambda: next(launches)()))
    # A gradient of their own to add to: timing has added to the others.
    fresh = Operands.of(shape, dtype, device)
    return Trial(tuple(lines), lambda: verify(shape, fresh, made), shape.work(dtype))


def cublaslt_launches(
    shape: Shape, dtype: torch.dtype, sets: list[Operands]
) -> list[Callable[[], None]]:
    """Into amp_ext's dtype; a product that is added is added in FP32, by beta = 1."""

    def out(given: Operands) -> Tensor:
        if given.c is not None:
            return given.c
        size = shape.m, shape.n
        return torch.empty(size, dtype=shape.out or dtype, device=given.a.device)

    operands = [(*shape.views(given.a, given.b), out(given)) for given in sets]
    return cublaslt.fastest(operands, beta=float(shape.accumulate))


def by_cublaslt(dtype: torch.dtype, shape: Shape, given: Operands) -> Tensor:
    """The fastest algorithm's result, chosen on a copy, because choosing adds to it."""
    out = torch.empty(shape.m, shape.n, dtype=shape.out or dtype, device=given.a.device)
    result = out if given.c is None else given.c
    a, b = shape.views(given.a, given.b)
    cublaslt.fastest([(a, b, result.clone()), (a, b, result)], float(shape.accumulate))[1]()
    return result


def verify(shape: Shape, given: Operands, made: dict[str, tuple[Launch, Callable]]) -> None:
    """Results are as near to the product in FP64 as FP32 sums, rounded once, must be.

    torch may add up 16-bit parts of a sum, each of them rounded: four units of the sum of the
    terms' magnitudes, which is the bound of the error in FP32 over k * UNIT.
    """
    eps = torch.finfo(given.a.dtype).eps

    def rounded(total: Bounded, dtype: torch.dtype) -> Bounded:
        return total if dtype == torch.float32 else total.rounded(dtype)

    def rounded_in_parts(total: Bounded) -> Bounded:
        return Bounded(total.value, total.error * (1 + 4 * eps / (shape.k * UNIT)))

    results = {}
    for name, (launch, around) in made.items():
        mine = given.clone()
        with around():
            result = launch(shape, mine.widened() if name == FP32_LINE else mine)
        ends = partial(rounded, dtype=result.dtype)
        if name == BASELINE:
            ends = lambda total, dtype=result.dtype: rounded(rounded_in_parts(total), dtype)  # noqa: E731
        results[name] = result, ends
    compare_products(*shape.views(given.a, given.b), results, given.c)


def limit(setup: Setup) -> Case:
    """torch's FP32 product of square matrices."""
    size = 128 if setup.quick else 2048

    def build_product() -> Trial:
        shape = Shape("", size, size, size, "NN")
        a, b = shape.operands(torch.float32, setup.device)
        product = Provider(FP32_LINE, lambda: torch.mm(a, b))
        return Trial((product,), work=shape.work(torch.float32))

    return Case(f"torch.mm {size}^3 NN fp32", build_product, limit=True)


def cases(setup: Setup) -> list[Case]:
    made = []
    for dtype in setup.dtypes(FP16, BF16):
        for shape in shapes(setup, dtype):
            hopeless = torch_is_hopeless(shape, dtype, setup.device)
            baseline = CUBLASLT if setup.on_gpu else FP32_LINE if hopeless else BASELINE
            words = f"{NAMES[dtype]} {shape.name} {shape.layout}"
            trial = partial(build, shape, dtype, setup.device)
            made.append(Case(words, trial, not hopeless, baseline, dtype))
    return made


OP = Op(
    name="gemm",
    notes=(
        "m x n x k, with k summed over in FP32, or a layer and its pass; NT has the second operand "
        "transposed in memory. A weight's gradient is FP32: wgrad, accumulate adds it to the last "
        "one. torch rounds that to 16 bits first; fp32 is torch's product of FP32 operands.",
        "On a GPU ratios are to cublaslt: the fastest of the algorithms that cuBLASLt's heuristics "
        "name, into amp_ext's dtype; library is amp_ext by torch's GEMM.",
    ),
    rate="GFLOP/s",
    host=False,
    limit=limit,
    cases=cases,
)
