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


class Model:
    """Hold parameters of 4 elements and the scaled gradients of a backward pass."""

    def __init__(self, count: int, device: torch.device) -> None:
        torch.manual_seed(0)
        grads = gradients(count * [ELEMENTS], device=device)
        self.parameters = parameters(grads)
        self.scaled = torch._foreach_mul(grads, INIT_SCALE)

    def write_gradients(self) -> None:
        torch._foreach_copy_([leaf.grad for leaf in self.parameters], self.scaled)


class Loop:
    """Step a model by a scaler and SGD, with a stopwatch in optimizer.step."""

    def __init__(
        self, scaler_class: type, model: Model, clips: bool, fused: bool, device: torch.device
    ) -> None:
        self.model, self.clips = model, clips
        self.optimizer = torch.optim.SGD(model.parameters, lr=1e-4, fused=fused)
        self.scaler = scaler_class(device.type, init_scale=INIT_SCALE)
        self.scaler.scale(torch.zeros((), device=device))
        self.step_ns = 0  # of the last step
        step = self.optimizer.step

        @functools.wraps(step)
        def timed(*args, **kwargs):
            start = time.perf_counter_ns()
            result = step(*args, **kwargs)
            self.step_ns = time.perf_counter_ns() - start
            return result

        self.optimizer.step = timed

    def run(self) -> None:
        if self.clips and hasattr(self.scaler, "clip_grad_norm_"):
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        else:
            self.scaler.unscale_(self.optimizer)
            if self.clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def build(count: int, clips: bool, fused: bool, device: torch.device) -> Trial:
    """Make a trial where all scalers have one model, as big in the caches as a user's."""
    model = Model(count, device)
    lines = providers.lines(amp_ext.GradScaler, torch.amp.GradScaler, device)

    def timed(provider: Provider) -> Provider:
        own = Loop(provider.launch, model, clips, fused, device)
        return replace(
            provider,
            launch=own.run,
            prepare=model.write_gradients,
            excluded_ns=lambda: own.step_ns,
        )

    def verify_line(provider: Provider) -> None:
        pair = provider.launch, torch.amp.GradScaler
        verify(*(Loop(each, Model(count, device), clips, fused, device) for each in pair))

    return Trial(lines, verify_line, Work(parameters=count), timed, [BASELINE])


def verify(mine: Loop, theirs: Loop) -> None:
    """Expect torch's parameters and scale on two new models, with an overflow between.

    Gradients are torch's too, except after an overflow: torch spoils the clipped ones.
    """
    rtol = CLIPPED_RTOL if mine.clips else 0.0
    for when, poison in (("a step", None), ("an overflow", torch.inf), ("another step", None)):
        for loop in (mine, theirs):
            loop.model.write_gradients()
            if poison is not None:
                loop.model.parameters[-1].grad[-1] = poison
            loop.run()
        leaves = mine.model.parameters, theirs.model.parameters
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
        groups = torch.optim.SGD(Model(count, setup.device).parameters, lr=1e-4).param_groups
        return lambda: [leaf.grad for group in groups for leaf in group["params"]]

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
