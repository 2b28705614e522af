"""Time gemm: matrix products of 16-bit operands, accumulated in FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from amp_ext import ops
from harness import bounds, cublaslt, providers
from harness.ledger import FP32_LINE
from harness.lists import rotated
from harness.providers import Line
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
    check,
    faults,
)
from workloads.gemm_shapes import Shape, shapes

CUBLASLT = "cublaslt"
IN_PARTS = (BASELINE, providers.LIBRARY)  # torch may add up parts of sums in 16 bits
HOPELESS_FLOPS = 2**31  # of products that take torch seconds, in FP16, NN, on a CPU
FP32_FLOPS = 2**37  # larger products are not worth a GPU's time in FP32


class Operands(NamedTuple):
    """Hold A and B as they lie in memory, and the sum that a product is added to."""

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
        """Return FP32 operands in the same layout."""
        return Operands(self.a.float(), self.b.float(), self.c)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def ours(shape: Shape, given: Operands) -> Tensor:
    trans_a, trans_b = (letter == "T" for letter in shape.layout)
    a, b, c = given
    if c is not None:
        ops.gemm_accumulate_(c, a, b, trans_a=trans_a, trans_b=trans_b)
        return c
    return ops.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=shape.out)


def theirs(shape: Shape, given: Operands) -> Tensor:
    """Form an FP32 gradient as torch.autocast does: a 16-bit product, then cast or added."""
    product = torch.mm(*shape.views(given.a, given.b))
    if given.c is not None:
        return given.c.add_(product)
    return product.to(shape.out or product.dtype)


def in_fp32(shape: Shape, given: Operands) -> Tensor:
    a, b = shape.views(given.a, given.b)
    return torch.mm(a, b) if given.c is None else given.c.addmm_(a, b)


def torch_is_hopeless(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's product takes seconds: a large one of FP16, NN, on a CPU."""
    slow = device.type == "cpu" and dtype == FP16 and shape.layout == "NN"
    return slow and shape.flops >= HOPELESS_FLOPS


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trial:
    """Make a trial where all providers multiply the same values into results of their own."""
    given = Operands.of(shape, dtype, device)
    made = providers.lines(ours, theirs, device, products=True)
    if torch_is_hopeless(shape, dtype, device):
        del made[BASELINE]
    sets = rotated(given, given.bytes, Operands.clone, device)

    def timed(name: str, line: Line, sets: list[Operands]) -> Provider:
        turns = itertools.cycle(sets)
        return Provider(name, lambda: line.launch(shape, next(turns)), around=line.around)

    launched = [timed(name, line, sets) for name, line in made.items()]
    if device.type == "cpu" or shape.flops <= FP32_FLOPS:
        made[FP32_LINE] = Line(in_fp32)
        wide = rotated(given.widened(), 2 * given.bytes, Operands.clone, device)
        launched.append(timed(FP32_LINE, made[FP32_LINE], wide))

    def cublaslt_provider() -> Provider:
        provider, made[CUBLASLT] = by_cublaslt(shape, dtype, sets)
        return provider

    if device.type == "cuda":
        launched.append(providers.guarded(CUBLASLT, cublaslt_provider))

    def verify_all(names: Collection[str]) -> dict[str, str]:
        fresh = Operands.of(shape, dtype, device)  # timing has added to the other sums
        return verify(shape, fresh, {name: made[name] for name in names})

    return Trial(tuple(launched), verify_all, shape.work(dtype))


def by_cublaslt(shape: Shape, dtype: torch.dtype, sets: list[Operands]) -> tuple[Provider, Line]:
    """Return a provider of launches on the sets in turn, and a line for other operands.

    Both use the algorithm that is the fastest on the sets, into amp_ext's dtype; a product that
    is added is added in FP32, by beta = 1.

    Raises:
        OSError, RuntimeError: there is no library, or no algorithm.
    """

    def out(given: Operands) -> Tensor:
        if given.c is not None:
            return given.c
        return torch.empty(shape.m, shape.n, dtype=shape.out or dtype, device=given.a.device)

    # One result for all sets: torch's allocator gives the others the same memory every time too.
    shared = out(sets[0])
    operands = [
        (*shape.views(given.a, given.b), shared if given.c is None else given.c) for given in sets
    ]
    product = cublaslt.Product(cublaslt.library(), operands[0], float(shape.accumulate))
    algorithm = product.fastest(operands)
    launches = itertools.cycle([product.launch(algorithm, each) for each in operands])

    def launch(shape: Shape, given: Operands) -> Tensor:
        result = out(given)
        product.launch(algorithm, (*shape.views(given.a, given.b), result))()
        return result

    return Provider(CUBLASLT, lambda: next(launches)()), Line(launch)


def verify(shape: Shape, given: Operands, lines: Mapping[str, Line]) -> dict[str, str]:
    """Expect products in FP64, rounded once to amp_ext's dtype; IN_PARTS to 16 bits."""
    dtype = given.a.dtype
    results = {}

    def run(name: str, line: Line) -> None:
        mine = given.clone()
        wide = name == FP32_LINE
        with line.around():
            result = line.launch(shape, mine.widened() if wide else mine)
        wanted = FP32 if wide else shape.out or dtype
        check(result.dtype == wanted, f"{name}'s result is {result.dtype}, not {wanted}")
        results[name] = result, dtype if name in IN_PARTS else wanted

    wrong = faults({name: partial(run, name, line) for name, line in lines.items()})
    return wrong | bounds.compare_products(*shape.views(given.a, given.b), given.c, results)


def limit(setup: Setup) -> Case:
    """Time torch's product of square matrices, on a GPU of 16-bit ones."""
    dtype, size = FP32, 2048
    if setup.on_gpu:
        dtype, size = (setup.dtypes(FP16, BF16) or (FP16,))[0], 8192
    if setup.quick:
        size = 128

    def build_product() -> Trial:
        shape = Shape("", size, size, size, "NN")
        a, b = shape.operands(dtype, setup.device)
        name = BASELINE if setup.on_gpu else FP32_LINE
        return Trial((Provider(name, lambda: torch.mm(a, b)),), work=shape.work(dtype))

    words = f"torch.mm {size}^3 NN {NAMES[dtype]}"
    return Case(words, build_product, dtype=dtype, limit=True)


def cases(setup: Setup) -> list[Case]:
    def case(shape: Shape, dtype: torch.dtype) -> Case:
        hopeless = torch_is_hopeless(shape, dtype, setup.device)
        baseline = CUBLASLT if setup.on_gpu else FP32_LINE if hopeless else BASELINE
        words = f"{NAMES[dtype]} {shape.name} {shape.layout}"
        trial: Callable[[], Trial] = partial(build, shape, dtype, setup.device)
        return Case(words, trial, not hopeless, baseline, dtype)

    return [case(s, dtype) for dtype in setup.dtypes(FP16, BF16) for s in shapes(setup, dtype)]


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
