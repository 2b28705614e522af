"""Time update_scale_: move the loss scale after a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from amp_ext import ops
from harness import providers
from harness.registry import FP32, Case, Op, Provider, Setup, Trial, Work, bound, check

GROWTH, BACKOFF = 2.0, 0.5
INIT_SCALE = 65536.0
INTERVAL = 2000
CHECKED_STEPS = 50
State = tuple[Tensor, Tensor]  # a scale and its tracker


def state(device: torch.device) -> State:
    return torch.tensor(INIT_SCALE, device=device), torch.tensor(0, device=device).int()


def calls(setup: Setup) -> range:
    return range(4 if setup.quick else 20)


def ours(state: State, found_infs: Sequence[Tensor], interval: int) -> None:
    ops.update_scale_(*state, found_infs, GROWTH, BACKOFF, interval)


def theirs(state: State, found_infs: Sequence[Tensor], interval: int) -> None:
    """Add up the optimizers' found_infs as torch.amp.GradScaler.update does."""
    found = found_infs[0]
    if len(found_infs) > 1:
        found = found.clone()
        for other in found_infs[1:]:
            found += other
    torch._amp_update_scale_(*state, found, GROWTH, BACKOFF, interval)


def flags(count: int, overflow: bool, device: torch.device) -> list[Tensor]:
    """Make the found_infs of `count` optimizers; the last one may be an overflow."""
    found_infs = [torch.zeros((), device=device) for _ in range(count)]
    found_infs[-1].fill_(float(overflow))
    return found_infs


def build(count: int, moves: bool, setup: Setup) -> Trial:
    """Make a trial with a static scale, or with an overflow at every other step."""
    interval = 1 if moves else INTERVAL

    def timed(provider: Provider) -> Provider:
        own = state(setup.device)
        turns = itertools.cycle([flags(count, found, setup.device) for found in (False, moves)])

        def launch() -> None:
            for _ in calls(setup):
                provider.launch(own, next(turns), interval)

        return replace(provider, launch=launch)

    lines = providers.lines(ours, theirs, setup.device)
    work = Work(calls=len(calls(setup)))
    return Trial(lines, lambda line: verify(line, count, setup.device), work, timed)


def verify(line: Provider, count: int, device: torch.device) -> None:
    """Expect the right scale and tracker after each step; a third of the steps overflow."""
    own, interval = state(device), 3
    scale, tracker = INIT_SCALE, 0
    generator = torch.Generator().manual_seed(0)
    for step in range(CHECKED_STEPS):
        overflow = bool(torch.rand((), generator=generator) < 1 / 3)
        line.launch(own, flags(count, overflow, device), interval)
        tracker = 0 if overflow else tracker + 1
        if overflow:
            scale *= BACKOFF
        elif tracker == interval:
            scale, tracker = scale * GROWTH, 0
        found = own[0].item(), own[1].item()
        words = f"after step {step} scale and tracker are"
        check(found == (scale, tracker), f"{words} {found}, not {(scale, tracker)}")


def limit(setup: Setup) -> Case:
    """Time the smallest op that torch has, on one element."""

    def make() -> Callable[[], object]:
        one = torch.zeros((), device=setup.device)
        return lambda: [one.zero_() for _ in calls(setup)]

    return bound("zero_ of 1 element", make, Work(calls=len(calls(setup))))


def cases(setup: Setup) -> list[Case]:
    if not setup.dtypes(FP32):
        return []
    return [
        Case(
            f"{count} found_inf{'s' if count > 1 else ''}, scale {words}",
            partial(build, count, moves, setup),
        )
        for count in (1, 8)
        for moves, words in ((False, "unmoved"), (True, "moved"))
    ]


OP = Op(
    name="update_scale",
    notes="One found_inf an optimizer; the scale is never due, or doubled and halved in turn. "
    "torch adds several found_infs up one by one before torch._amp_update_scale_.",
    rate="us/call",
    host=False,
    limit=limit,
    cases=cases,
)
