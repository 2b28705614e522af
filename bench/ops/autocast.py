"""Time the host's cost of a product within an autocast region: matrices of 4 x 4."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from harness import providers
from harness.registry import (
    BASELINE,
    BF16,
    FP16,
    NAMES,
    Case,
    Op,
    Provider,
    Setup,
    Trial,
    Work,
    bound,
    check,
)

CALLS, QUICK_CALLS = 100, 10
CHECKED_CALLS = 10  # gradients grow by at most 12 a call, and BF16 is exact up to 256
REGIONS = {"amp_ext": amp_ext.autocast, BASELINE: torch.autocast}
NO_GRAD, FORWARD, BACKWARD = MODES = ("no grad", "forward", "fwd+bwd")


class Product(NamedTuple):
    """Describe a product as a network makes it."""

    name: str
    run: Callable[..., Tensor]  # takes the tensors
    shapes: Sequence[tuple[int, ...]]
    weights: int = 0  # how many of the last tensors are FP32 parameters, not of the region's dtype


PRODUCTS = (
    Product("linear, FP32 weights", F.linear, [(4, 4), (4, 4), (4,)], weights=2),
    Product("mm", torch.mm, [(4, 4), (4, 4)]),
    Product("bmm", torch.bmm, [(1, 4, 4), (1, 4, 4)]),
    Product("conv2d 1x1, FP32 weight", F.conv2d, [(1, 4, 2, 2), (4, 4, 1, 1)], weights=1),
)


class Loop:
    """Make calls in one region, then one backward pass through all of them if wanted.

    The operands are small whole numbers, so that products are exact.
    """

    def __init__(
        self,
        product: Product,
        mode: str,
        dtype: torch.dtype,
        device: torch.device,
        region: Any,
        calls: int,
    ) -> None:
        self.region = partial(region, device.type, dtype=dtype)
        self.run_product, self.mode, self.calls = product.run, mode, range(calls)
        generator = torch.Generator().manual_seed(0)
        values = [torch.randint(-3, 4, s, generator=generator).float() for s in product.shapes]
        inputs = len(values) - product.weights
        self.tensors = [v.to(device, dtype if i < inputs else None) for i, v in enumerate(values)]
        for place, tensor in enumerate(self.tensors):
            tensor.requires_grad_(mode != NO_GRAD or place >= inputs)
        with torch.no_grad(), self.region():
            self.cotangents = calls * [torch.ones_like(product.run(*self.tensors))]

    def run(self) -> list[Tensor]:
        run_product, tensors = self.run_product, self.tensors
        with torch.set_grad_enabled(self.mode != NO_GRAD), self.region():
            results = [run_product(*tensors) for _ in self.calls]
        if self.mode == BACKWARD:
            for tensor in tensors:
                tensor.grad = None
            torch.autograd.backward(results, self.cotangents)
        return results


def build(loop: Callable[..., Loop], calls: int, device: torch.device) -> Trial:
    """Make a trial of loops in a region, of the number of calls given."""
    lines = providers.lines(REGIONS["amp_ext"], REGIONS[BASELINE], device, products=True)

    def timed(provider: Provider) -> Provider:
        return replace(provider, launch=loop(provider.launch, calls).run)

    def verify_line(provider: Provider) -> None:
        checked = min(calls, CHECKED_CALLS)
        verify(loop(provider.launch, checked), loop(REGIONS[BASELINE], checked))

    return Trial(lines, verify_line, Work(calls=calls), timed, unchecked=[BASELINE])


def verify(mine: Loop, theirs: Loop) -> None:
    """Expect exactly torch's results and gradients."""
    for result, expected in zip(mine.run(), theirs.run(), strict=True):
        check(result.dtype == expected.dtype, f"the result is {result.dtype}")
        check(result.equal(expected), "the result is not torch's")
    for place, (one, other) in enumerate(zip(mine.tensors, theirs.tensors, strict=True)):
        grads = [tensor.grad for tensor in (one, other) if tensor.grad is not None]
        same = not grads or (len(grads) == 2 and grads[0].equal(grads[1]))
        check(same, f"the gradient of tensor {place} is not torch's")


def limit(setup: Setup) -> Case:
    """Time torch's own call, without autocast."""
    calls = QUICK_CALLS if setup.quick else CALLS

    def make() -> Callable[[], object]:
        a, b = (torch.ones(4, 4, device=setup.device) for _ in range(2))
        return lambda: [torch.mm(a, b) for _ in range(calls)]

    return bound("mm, FP32, no autocast, no grad", make, Work(calls=calls))


def cases(setup: Setup) -> list[Case]:
    calls = QUICK_CALLS if setup.quick else CALLS
    made = []
    for dtype, product, mode in itertools.product(
        setup.dtypes(FP16, also=(BF16,)), PRODUCTS, MODES
    ):
        loop = partial(Loop, product, mode, dtype, setup.device)
        name = f"{NAMES[dtype]} {product.name}, {mode}"
        made.append(Case(name, partial(build, loop, calls, setup.device), dtype=dtype))
    return made


OP = Op(
    name="autocast",
    notes=f"Host time of {CALLS} calls in one autocast region ({QUICK_CALLS} with --quick), "
    "entering and leaving it included; matrices of 4 x 4. The first call casts FP32 weights, the "
    "others find the copy. A backward pass runs through all calls at once, after the region.",
    rate="us/call",
    host=True,
    limit=limit,
    cases=cases,
)
