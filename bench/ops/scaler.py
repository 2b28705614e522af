"""Time the host's cost of unscale_ + step + update, less the optimizer's own step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import amp_ext
from harness import providers
from harness.registry import BASELINE, FP32, Case, Op, Provider, Setup, Trial, Work, bound, check
from workloads.gradients import gradients, parameters

ELEMENTS = 4
MAX_NORM = 0.1
INIT_SCALE = 65536.0
# Tolerance of clipped gradients. Norms differ by their rounding, in float32 of n elements by
# n / 2 * 2**-24.
CLIPPED_RTOL = 4000 * ELEMENTS / 2 * 2.0**-24


class Loop:
    """Step parameters with scaled gradients by a scaler and an optimizer.

    Args:
        make: makes a scaler and an optimizer of a device, an initial scale and parameters.
        shapes: of the parameters.
        clips: whether gradients are clipped.
        unscales: whether unscale_ is called where nothing is clipped.
        device: of the parameters.
    """

    def __init__(
        self,
        make: Callable[..., tuple],
        shapes: list[int],
        clips: bool,
        unscales: bool,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        grads = gradients(shapes, device=device)
        self.parameters = parameters(grads)
        self.scaled = torch._foreach_mul(grads, INIT_SCALE)
        self.clips, self.unscales = clips, unscales
        self.scaler, self.optimizer = make(device.type, INIT_SCALE, self.parameters)
        self.scaler.scale(torch.zeros((), device=device))

    def prepare(self, last: float | None = None) -> None:
        """Write the gradients; torch unscales them in place."""
        torch._foreach_copy_([leaf.grad for leaf in self.parameters], self.scaled)
        if last is not None:
            self.parameters[-1].grad[-1] = last

    def run(self) -> None:
        if self.clips and hasattr(self.scaler, "clip_grad_norm_"):
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        elif self.unscales or self.clips:
            self.scaler.unscale_(self.optimizer)
            if self.clips:
                torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Stopwatch:
    """Time each call of an optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.ns = 0  # of the last step
        self.step = optimizer.step
        optimizer.step = functools.wraps(self.step)(partial(self.timed))

    def timed(self, *args: object, **kwargs: object) -> object:
        start = time.perf_counter_ns()
        result = self.step(*args, **kwargs)
        self.ns = time.perf_counter_ns() - start
        return result


def build(count: int, clips: bool, fused: bool, device: torch.device) -> Trial:
    def make(scaler_class: type, device_type: str, scale: float, parameters: list) -> tuple:
        scaler = scaler_class(device_type, init_scale=scale)
        return scaler, torch.optim.SGD(parameters, lr=1e-4, fused=fused)

    def loop(make: Callable[..., tuple]) -> Loop:
        return Loop(make, count * [ELEMENTS], clips, True, device)

    def timed(provider: Provider) -> Provider:
        own = loop(provider.launch)
        watch = Stopwatch(own.optimizer)
        return replace(provider, launch=own.run, prepare=own.prepare, excluded_ns=lambda: watch.ns)

    ours, theirs = (partial(make, each) for each in (amp_ext.GradScaler, torch.amp.GradScaler))
    lines = providers.lines(ours, theirs, device)
    return Trial(
        lines,
        lambda provider: verify(loop(provider.launch), loop(theirs)),
        Work(parameters=count),
        timed,
        unchecked=[BASELINE],
    )


def verify(mine: Loop, theirs: Loop) -> None:
    """Expect torch's parameters and scale on two new models, with an overflow between.

    Gradients are torch's too, except after an overflow: torch spoils the clipped ones. Parameters
    start at 0, so that the tolerance is relative to their moves.
    """
    for loop in (mine, theirs):
        torch._foreach_zero_([leaf.detach() for leaf in loop.parameters])
    rtol = CLIPPED_RTOL if mine.clips else 0.0
    for when, poison in (("a step", None), ("an overflow", torch.inf), ("another step", None)):
        for loop in (mine, theirs):
            loop.prepare(poison)
            loop.run()
        leaves = mine.parameters, theirs.parameters
        compared = {"parameters": leaves}
        if poison is None:
            compared["gradients"] = [[leaf.grad for leaf in each] for each in leaves]
        for name, tensors in compared.items():
            near = torch.isclose(*map(torch.stack, tensors), rtol=rtol, atol=0.0)
            wrong = int((~near).any(1).sum())
            check(wrong == 0, f"after {when} {wrong} {name} differ from torch's")
        scales = mine.scaler.get_scale(), theirs.scaler.get_scale()
        check(scales[0] == scales[1], f"after {when} the scale is {scales[0]}, not {scales[1]}")


def limit(setup: Setup) -> Case:
    """Time the least that Python can do: a list of all gradients."""
    count = 400 if setup.quick else 4000

    def make() -> Callable[[], object]:
        leaves = parameters(gradients(count * [ELEMENTS], device=setup.device))
        return lambda: [leaf.grad for leaf in leaves]

    work = Work(parameters=count)
    return bound(f"list comprehension, {count}", make, work, provider="python")


def cases(setup: Setup) -> list[Case]:
    if not setup.dtypes(FP32):
        return []
    counts = (400, 40) if setup.quick else (4000, 400)
    return [
        Case(
            f"{count} parameters, {'clipped ' if clips else ''}{'fused ' if fused else ''}SGD",
            partial(build, count, clips, fused, setup.device),
        )
        for clips in (False, True)
        for count in counts
        for fused in (False, True)
    ]


OP = Op(
    name="scaler",
    notes="Host time of unscale_ + step + update, where clipped with clip_grad_norm_; parameters "
    f"of {ELEMENTS} fp32 elements. Gradients are written anew before every step, untimed; the "
    "time inside optimizer.step is measured in the same step and subtracted.",
    rate="us/param",
    host=True,
    limit=limit,
    cases=cases,
)
