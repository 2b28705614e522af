"""The host's cost of a product within an autocast region: matrices of 4 x 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from registry import BASELINE, OURS, Case, Op, Provider, Trial, check

CALLS, QUICK_CALLS = 100, 10
REGIONS = {OURS: amp_ext.autocast, BASELINE: torch.autocast}


@dataclass(frozen=True)
class Call:
    """A product as a network makes it.

    Args:
        name: the op and its operands' dtypes.
        run: takes the tensors.
        shapes: of the tensors.
        weights: how many of the last tensors are FP32 parameters; the others are FP16 activations.
    """

    name: str
    run: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    weights: int = 0

    def tensors(self, grad: bool, device: torch.device) -> list[Tensor]:
        """Small whole numbers, of which no product is rounded."""
        generator = torch.Generator().manual_seed(0)
        made = []
        for place, shape in enumerate(self.shapes):
            weight = place >= len(self.shapes) - self.weights
            values = torch.randint(-3, 4, shape, generator=generator).float().to(device)
            tensor = values if weight else values.half()
            made.append(tensor.requires_grad_(grad or weight))
        return made


CALLS_MEASURED = (
    Call("linear, FP32 weights", F.linear, [(4, 4), (4, 4), (4,)], weights=2),
    Call("mm, FP16", torch.mm, [(4, 4), (4, 4)]),
    Call("bmm, FP16", torch.bmm, [(1, 4, 4), (1, 4, 4)]),
    Call("conv2d 1x1, FP32 weight", F.conv2d, [(1, 4, 2, 2), (4, 4, 1, 1)], weights=1),
)
NO_GRAD, FORWARD, BACKWARD = MODES = ("no grad", "forward", "with backward")


class Loop:
    """Calls in one region, then perhaps one backward pass through all of them."""

    def __init__(self, region: Any, call: Call, mode: str, calls: int, device: torch.device):
        self.region = partial(region, device.type, dtype=torch.float16)
        self.run_call, self.mode, self.calls = call.run, mode, range(calls)
        self.tensors = call.tensors(mode != NO_GRAD, device)
        with torch.no_grad(), self.region():
            self.cotangents = calls * [torch.ones_like(call.run(*self.tensors))]

    def run(self) -> list[Tensor]:
        run_call, tensors = self.run_call, self.tensors
        with torch.set_grad_enabled(self.mode != NO_GRAD), self.region():
            results = [run_call(*tensors) for _ in self.calls]
        if self.mode == BACKWARD:
            for tensor in tensors:
                tensor.grad = None
            torch.autograd.backward(results, self.cotangents)
        return results


def build(call: Call, mode: str, calls: int, device: torch.device) -> Trial:
    loops = {name: Loop(region, call, mode, calls, device) for name, region in REGIONS.items()}
    providers = tuple(Provider(name, loop.run) for name, loop in loops.items())
    return Trial(providers, lambda: verify(*loops.values()), calls=calls)


def verify(mine: Loop, theirs: Loop) -> None:
    """Results and gradients are torch's: of small whole numbers both are exact."""
    results = mine.run()[-1], theirs.run()[-1]
    check(results[0].dtype == results[1].dtype, f"the result is {results[0].dtype}")
    check(results[0].equal(results[1]), "the result is not torch's")
    for place, (one, other) in enumerate(zip(mine.tensors, theirs.tensors, strict=True)):
        grads = [tensor.grad for tensor in (one, other) if tensor.grad is not None]
        same = not grads or (len(grads) == 2 and grads[0].equal(grads[1]))
        check(same, f"the gradient of tensor {place} is not torch's")


def limit(device: torch.device, quick: bool) -> Case:
    """torch's own call, without autocast."""
    calls = QUICK_CALLS if quick else CALLS

    def build_calls() -> Trial:
        a, b = (torch.ones(4, 4, device=device) for _ in range(2))

        def launch() -> list[Tensor]:
            return [torch.mm(a, b) for _ in range(calls)]

        return Trial((Provider("torch", launch),), calls=calls)

    return Case("limit: mm, FP32, no autocast, no grad", build_calls)


def cases(device: torch.device, quick: bool) -> list[Case]:
    calls = QUICK_CALLS if quick else CALLS
    return [
        Case(f"{call.name}, {mode}", partial(build, call, mode, calls, device))
        for call in CALLS_MEASURED
        for mode in MODES
    ]


OP = Op(
    name="autocast",
    notes=(
        f"Host time of {CALLS} calls in one autocast region ({QUICK_CALLS} with --quick), entering "
        "and leaving it included, FP16; matrices of 4 x 4. The first call casts FP32 weights, the "
        "others find the copy. A backward pass runs through all calls at once, after the region.",
    ),
    rate="us/call",
    host=True,
    limit=limit,
    cases=cases,
)
