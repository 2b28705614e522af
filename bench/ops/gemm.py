"""Time gemm: matrix products of 16-bit operands, accumulated in FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from amp_ext import ops
from harness import bounds, cublaslt, providers
from harness.ledger import FP32_LINE
from harness.lists import rotated
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
    bound,
    check,
)
from workloads.gemm_shapes import Shape, shapes

CUBLASLT = "cublaslt"
IN_PARTS = (BASELINE, providers.LIBRARY)  # torch may add up parts of sums in 16 bits
ROWS = 1024
FP32_FLOPS = 2**37  # larger products are not worth a GPU's time in FP32


@dataclass(frozen=True)
class Operands:
    """Hold A and B as they lie in memory, and the sum that a product is added to."""

    shape: Shape
    a: Tensor
    b: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Operands:
        a, b = shape.operands(dtype, device)
        c = torch.randn(shape.m, shape.n, device=device) if shape.accumulate else None
        return cls(shape, a, b, c)

    @cached_property
    def views(self) -> tuple[Tensor, Tensor]:
        """Return A as [m, k] and B as [k, n]."""
        return self.shape.views(self.a, self.b)

    def clone(self) -> Operands:
        c = None if self.c is None else self.c.clone()
        return Operands(self.shape, self.a.clone(), self.b.clone(), c)

    def widened(self) -> Operands:
        """Return FP32 operands in the same layout."""
        return Operands(self.shape, self.a.float(), self.b.float(), self.c)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in (self.a, self.b, self.c) if each is not None)


def ours(shape: Shape, given: Operands) -> Tensor:
    trans_a, trans_b = (letter == "T" for letter in shape.layout)
    if given.c is not None:
        ops.gemm_accumulate_(given.c, given.a, given.b, trans_a=trans_a, trans_b=trans_b)
        return given.c
    return ops.gemm(given.a, given.b, trans_a=trans_a, trans_b=trans_b, out_dtype=shape.out)


def theirs(shape: Shape, given: Operands) -> Tensor:
    """Form an FP32 gradient as torch.autocast does: a 16-bit product, then cast or added."""
    product = torch.mm(*given.views)
    if given.c is not None:
        return given.c.add_(product)
    return product.to(shape.out) if shape.out else product


def in_fp32(shape: Shape, given: Operands) -> Tensor:
    return torch.mm(*given.views) if given.c is None else given.c.addmm_(*given.views)


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trial:
    """Make a trial where all providers multiply the same values into results of their own."""
    given = Operands.of(shape, dtype, device)
    sets = rotated(given, given.bytes, Operands.clone, device)
    made = providers.lines(ours, theirs, device, products=True)
    if device.type == "cpu" or shape.flops <= FP32_FLOPS:
        made.append(Provider(FP32_LINE, in_fp32))
    fastest = cache(partial(by_cublaslt, shape, sets))

    def multiply_by_cublaslt(shape: Shape, given: Operands) -> Tensor:
        launch, out = fastest()(given)
        launch()
        return out

    if device.type == "cuda":
        made.append(Provider(CUBLASLT, multiply_by_cublaslt))

    def timed(provider: Provider) -> Provider:
        if provider.name == CUBLASLT:
            launches = itertools.cycle([fastest()(each)[0] for each in sets])
            return replace(provider, launch=lambda: next(launches)())
        chosen = sets
        if provider.name == FP32_LINE:
            chosen = rotated(given.widened(), 2 * given.bytes, Operands.clone, device)
        turns = itertools.cycle(chosen)
        return replace(provider, launch=lambda: provider.launch(shape, next(turns)))

    @cache
    def exact() -> tuple[Operands, Tensor]:
        """Return operands whose sums nothing was added to, and the result in FP64."""
        fresh = Operands.of(shape, dtype, device)
        a, b = (x.double() for x in fresh.views)
        return fresh, a @ b if fresh.c is None else torch.addmm(fresh.c.double(), a, b)

    return Trial(made, lambda line: verify(line, shape, *exact()), shape.work(dtype), timed)


def by_cublaslt(
    shape: Shape, sets: Sequence[Operands]
) -> Callable[[Operands], tuple[Callable[[], object], Tensor]]:
    """Return a function of operands that makes a launch and the matrix it writes.

    The algorithm is the fastest on the sets, into amp_ext's dtype; a product that is added is
    added in FP32, by beta = 1.

    Raises:
        OSError, RuntimeError: there is no library, or no algorithm.
    """
    # One result for all sets: torch's allocator gives the others the same memory every time too.
    first = sets[0].a
    shared = first.new_empty(shape.m, shape.n, dtype=shape.out or first.dtype)

    def matrices(given: Operands) -> cublaslt.Operands:
        return (*given.views, shared if given.c is None else given.c)

    operands = [matrices(given) for given in sets]
    product = cublaslt.Product(cublaslt.library(), operands[0], float(shape.accumulate))
    algorithm = product.fastest(operands)
    return lambda given: (product.launch(algorithm, matrices(given)), matrices(given)[2])


def verify(provider: Provider, shape: Shape, given: Operands, exact: Tensor) -> None:
    """Expect a product in FP64, rounded once to amp_ext's dtype; IN_PARTS to 16 bits."""
    mine, dtype = given.clone(), given.a.dtype
    wanted = shape.out or dtype
    if provider.name == FP32_LINE:
        mine, wanted = mine.widened(), FP32
    result, name = provider.launch(shape, mine), f"{provider.name}'s result"
    check(result.dtype == wanted, f"{name} is {result.dtype}, not {wanted}")
    check(result.shape == exact.shape, f"{name} is of shape {tuple(result.shape)}")
    rounded = dtype if provider.name in IN_PARTS else wanted
    for start in range(0, shape.m, ROWS):  # to save memory
        rows = slice(start, start + ROWS)
        bounds.compare(result[rows], exact[rows], shape.k, rounded, name)


def limit(setup: Setup) -> Case:
    """Time torch's product of square matrices, on a GPU of 16-bit ones."""
    dtype, size, name = FP32, 2048, FP32_LINE
    if setup.on_gpu:
        dtype, size, name = (setup.dtypes(FP16, BF16, also=(FP32,)) or (FP16,))[0], 8192, BASELINE
    if setup.quick:
        size = 128
    shape = Shape("", size, size, size, "NN")

    def make() -> Callable[[], Tensor]:
        return partial(torch.mm, *shape.operands(dtype, setup.device))

    words = f"torch.mm {size}^3 NN {NAMES[dtype]}"
    return bound(words, make, shape.work(dtype), dtype, name)


def cases(setup: Setup) -> list[Case]:
    baseline = CUBLASLT if setup.on_gpu else BASELINE
    return [
        Case(
            f"{NAMES[dtype]} {shape.name} {shape.layout}",
            partial(build, shape, dtype, setup.device),
            baseline=baseline,
            dtype=dtype,
        )
        for dtype in setup.dtypes(FP16, BF16)
        for shape in shapes(setup, dtype)
    ]


OP = Op(
    name="gemm",
    notes="m x n x k, with k summed over in FP32, or a layer and its pass; NT has the second "
    "operand transposed in memory. A weight's gradient is FP32: wgrad, accumulate adds it to the "
    "last one. torch rounds that to 16 bits first; fp32 is torch's product of FP32 operands. On a "
    "GPU ratios are to cublaslt: the fastest of the algorithms that cuBLASLt's heuristics name "
    "for sums in FP32, into amp_ext's dtype; library is amp_ext by torch's GEMM.",
    rate="GFLOP/s",
    host=False,
    limit=limit,
    cases=cases,
    axis="product",
)
