"""Time the host's cost of a product within an autocast region: matrices of 4 x 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from harness import providers
from harness.providers import Line
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
    check,
)

CALLS, QUICK_CALLS = 100, 10
CHECKED_CALLS = 10  # gradients grow by at most 12 a call, and BF16 is exact up to 256
REGIONS = {"amp_ext": amp_ext.autocast, BASELINE: torch.autocast}
NO_GRAD, FORWARD, BACKWARD = MODES = ("no grad", "forward", "fwd+bwd")


@dataclass(frozen=True)
class Call:
    """Describe a product as a network makes it.

    Args:
        name: the op, and its FP32 operands.
        run: takes the tensors.
        shapes: of the tensors.
        weights: how many of the last tensors are FP32 parameters; the others have the region's
            dtype.
    """

    name: str
    run: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    weights: int = 0

    def tensors(self, grad: bool, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Make small whole numbers with exact products."""
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for place, shape in enumerate(self.shapes):
            weight = place >= len(self.shapes) - self.weights
            values = torch.randint(-3, 4, shape, generator=generator).float().to(device)
            tensor = values if weight else values.to(dtype)
            tensors.append(tensor.requires_grad_(grad or weight))
        return tensors


CALLS_MEASURED = (
    Call("linear, FP32 weights", F.linear, [(4, 4), (4, 4), (4,)], weights=2),
    Call("mm", torch.mm, [(4, 4), (4, 4)]),
    Call("bmm", torch.bmm, [(1, 4, 4), (1, 4, 4)]),
    Call("conv2d 1x1, FP32 weight", F.conv2d, [(1, 4, 2, 2), (4, 4, 1, 1)], weights=1),
)


class Loop:
    """Make calls in one region, then one backward pass through all of them if wanted."""

    def __init__(
        self,
        region: Any,
        call: Call,
        mode: str,
        calls: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.region = partial(region, device.type, dtype=dtype)
        self.run_call, self.mode, self.calls = call.run, mode, range(calls)
        self.tensors = call.tensors(mode != NO_GRAD, dtype, device)
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


def build(call: Call, mode: str, calls: int, dtype: torch.dtype, device: torch.device) -> Trial:
    lines = providers.lines(REGIONS["amp_ext"], REGIONS[BASELINE], device, products=True)

    def loop(line: Line, calls: int) -> Loop:
        return Loop(line.launch, call, mode, calls, dtype, device)

    def timed(name: str, line: Line) -> Provider:
        return Provider(name, loop(line, calls).run, around=line.around)

    def verify_line(name: str, line: Line) -> None:
        verify(*(loop(each, min(calls, CHECKED_CALLS)) for each in (line, lines[BASELINE])))

    return providers.trial(lines, timed, verify_line, Work(calls=calls), unchecked=[BASELINE])


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

    def build_calls() -> Trial:
        a, b = (torch.ones(4, 4, device=setup.device) for _ in range(2))
        launch = lambda: [torch.mm(a, b) for _ in range(calls)]  # noqa: E731
        return Trial((Provider("torch", launch),), work=Work(calls=calls))

    return Case("mm, FP32, no autocast, no grad", build_calls, limit=True)


def cases(setup: Setup) -> list[Case]:
    calls = QUICK_CALLS if setup.quick else CALLS
    return [
        Case(
            f"{NAMES[dtype]} {call.name}, {mode}",
            partial(build, call, mode, calls, dtype, setup.device),
            dtype=dtype,
        )
        for dtype in setup.dtypes(FP16, also=(BF16,))
        for call in CALLS_MEASURED
        for mode in MODES
    ]


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
