"""The host's cost of a scaler's step: unscale_ + step + update, less the optimizer's own step."""

from __future__ import annotations

import functools
import time

import torch

import amp_ext
from amp_ext import testing
from registry import BASELINE, OURS, Case, Op, Provider, Trial, check

ELEMENTS = 4
INIT_SCALE = 65536.0


class Loop:
    """A scaler, an SGD optimizer and its parameters of 4 elements with scaled gradients."""

    def __init__(self, scaler_class: type, count: int, fused: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        grads = testing.gradients(count * [ELEMENTS], device=device)
        self.parameters = testing.parameters(grads)
        self.scaled = torch._foreach_mul(grads, INIT_SCALE)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4, fused=fused)
        self.optimizer.step = self._timed(self.optimizer.step)
        self.optimizer_ns = 0
        self.scaler = scaler_class(device.type, init_scale=INIT_SCALE)
        self.scaler.scale(torch.zeros((), device=device))

    def _timed(self, step):
        @functools.wraps(step)
        def timed(*args, **kwargs):
            start = time.perf_counter_ns()
            result = step(*args, **kwargs)
            self.optimizer_ns = time.perf_counter_ns() - start
            return result

        return timed

    def write_gradients(self) -> None:
        """What a backward pass leaves: the same scaled gradients before every step."""
        torch._foreach_copy_([leaf.grad for leaf in self.parameters], self.scaled)

    def run(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def provider(self, name: str) -> Provider:
        return Provider(name, self.run, self.write_gradients, lambda: self.optimizer_ns)


def build(count: int, fused: bool, device: torch.device) -> Trial:
    mine = Loop(amp_ext.GradScaler, count, fused, device)
    theirs = Loop(torch.amp.GradScaler, count, fused, device)
    providers = (mine.provider(OURS), theirs.provider(BASELINE))
    return Trial(providers, lambda: verify(mine, theirs), parameters=count)


def verify(mine: Loop, theirs: Loop) -> None:
    """Parameters and scale are torch's bit for bit, after the timed steps and after an overflow."""
    compare(mine, theirs, "the timed steps")
    for loop in (mine, theirs):
        loop.write_gradients()
        loop.parameters[-1].grad[-1] = torch.inf
        loop.run()
    compare(mine, theirs, "an overflow")


def compare(mine: Loop, theirs: Loop, when: str) -> None:
    pairs = zip(mine.parameters, theirs.parameters, strict=True)
    wrong = sum(not a.equal(b) for a, b in pairs)
    count = len(theirs.parameters)
    check(wrong == 0, f"after {when} {wrong} of {count} parameters differ from torch's")
    scales = mine.scaler.get_scale(), theirs.scaler.get_scale()
    check(scales[0] == scales[1], f"after {when} the scale is {scales[0]}, torch's {scales[1]}")


def limit(device: torch.device, quick: bool) -> Case:
    """The least that Python can do: a list of all gradients."""
    count = 400 if quick else 4000

    def build_walk() -> Trial:
        leaves = testing.parameters(testing.gradients(count * [ELEMENTS], device=device))
        groups = torch.optim.SGD(leaves, lr=1e-4).param_groups

        def walk() -> list[torch.Tensor]:
            return [leaf.grad for group in groups for leaf in group["params"]]

        return Trial((Provider("python", walk),), parameters=count)

    return Case(f"limit: list comprehension, {count}", build_walk)


def cases(device: torch.device, quick: bool) -> list[Case]:
    counts = (400, 40) if quick else (4000, 400)
    return [
        Case(
            f"{count} parameters, {'fused ' if fused else ''}SGD",
            functools.partial(build, count, fused, device),
        )
        for count in counts
        for fused in (False, True)
    ]


OP = Op(
    name="scaler",
    notes=(
        f"Host time of unscale_ + step + update; parameters of {ELEMENTS} fp32 elements. Their .grad "
        "is written anew before every step, untimed; the time inside optimizer.step is measured in "
        "the same step and subtracted.",
    ),
    rate="us/param",
    limit=limit,
    cases=cases,
)
