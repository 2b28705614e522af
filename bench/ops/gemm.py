"""gemm: matrix products of 16-bit operands, accumulated in FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from amp_ext import ops
from harness import cublaslt, providers
from harness.bounds import Bounded, compare_products
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


def turns(launch: Launch, shape: Shape, sets: list[Operands]) -> Callable[[], Tensor]:
    """Launches on one set after the other."""
    cycle = itertools.cycle(sets)
    return lambda: launch(shape, next(cycle))


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trial:
    """All providers multiply the same values, each into results of its own."""
    given = Operands.of(shape, dtype, device)
    made = providers.lines(ours, theirs, device, products=True)
    if torch_is_hopeless(shape, dtype, device):
        del made[BASELINE]
    sets = rotated(given, given.bytes, Operands.clone, device)
    timed = [
        Provider(name, turns(line.launch, shape, sets), around=line.around)
        for name, line in made.items()
    ]
    if device.type == "cpu" or shape.flops <= FP32_FLOPS:
        made[FP32_LINE] = Line(in_fp32)
        wide = rotated(given.widened(), 2 * given.bytes, Operands.clone, device)
        timed.append(Provider(FP32_LINE, turns(in_fp32, shape, wide)))

    def cublaslt_provider() -> Provider:
        provider, made[CUBLASLT] = by_cublaslt(shape, dtype, sets)
        return provider

    if device.type == "cuda":
        timed.append(providers.guarded(CUBLASLT, cublaslt_provider))

    def verify_all(names: Collection[str]) -> dict[str, str]:
        # With a gradient of its own to add to: timing has added to the others.
        fresh = Operands.of(shape, dtype, device)
        return verify(shape, fresh, {name: made[name] for name in names})

    return Trial(tuple(timed), verify_all, shape.work(dtype))


def by_cublaslt(shape: Shape, dtype: torch.dtype, sets: list[Operands]) -> tuple[Provider, Line]:
    """The provider of launches on the sets in turn, and a line that launches on other operands.

    Both are by the algorithm that is the fastest on the sets, into amp_ext's dtype; a product that
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
    product = cublaslt.Product(cublaslt.library(), *operands[0], float(shape.accumulate))
    algorithm = product.fastest(operands)
    launches = itertools.cycle([product.launch(algorithm, *each) for each in operands])

    def launch(shape: Shape, given: Operands) -> Tensor:
        result = out(given)
        product.launch(algorithm, *shape.views(given.a, given.b), result)()
        return result

    return Provider(CUBLASLT, lambda: next(launches)()), Line(launch)


def verify(shape: Shape, given: Operands, lines: Mapping[str, Line]) -> dict[str, str]:
    """What is wrong, by name: each result has to be as near to the product in FP64 as sums in FP32,
    rounded once to amp_ext's dtype, must be; but for those IN_PARTS and FP32's own."""
    dtype = given.a.dtype
    results = {}

    def run(name: str, line: Line) -> None:
        mine = given.clone()
        wide = name == FP32_LINE
        with line.around():
            result = line.launch(shape, mine.widened() if wide else mine)
        wanted = FP32 if wide else shape.out or dtype
        check(result.dtype == wanted, f"{name}'s result is {result.dtype}, not {wanted}")
        results[name] = result, partial(as_returned, name, wanted)

    def as_returned(name: str, wanted: torch.dtype, total: Bounded) -> Bounded:
        if name in IN_PARTS:
            total = total.in_parts(shape.k, dtype)
        return total if wanted == FP32 else total.rounded(wanted)

    wrong = faults({name: partial(run, name, line) for name, line in lines.items()})
    return wrong | compare_products(*shape.views(given.a, given.b), results, given.c)


def limit(setup: Setup) -> Case:
    """torch's product of square matrices: on a GPU of 16-bit ones, large enough to fill it."""
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
        "name for sums in FP32, into amp_ext's dtype; library is amp_ext by torch's GEMM.",
    ),
    rate="GFLOP/s",
    host=False,
    limit=limit,
    cases=cases,
)
