"""Time a step of GradScaler and AdamW: check, norm where clipped, optimizer, update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import amp_ext
from amp_ext.optim import AdamW
from harness import lists, providers
from harness.lists import KI, MI
from harness.registry import BASELINE, BF16, FP32, Case, Op, Provider, Setup, Trial, Work, check
from workloads.gradients import gradients, parameters

INIT_SCALE = 1024.0
LR, STEPS = 1e-3, 3
MAX_NORM = 0.1


def bytes_of(moment: torch.dtype) -> int:
    """Return the bytes that amp_ext moves for a parameter with two moments of a dtype.

    A gradient is read by the check and by the step; weight and moments are read and written.
    torch.amp's fused AdamW moves 40 bytes, and 48 where it clips.
    """
    gradient, weight = 2 * 4, 2 * 4
    return gradient + weight + 2 * 2 * moment.itemsize


class Training:
    """Hold parameters, their scaled gradients, a scaler and an optimizer."""

    def __init__(
        self, launch: Callable, shapes: list[int], clips: bool, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.scaled = torch._foreach_mul(gradients(shapes, device=device), INIT_SCALE)
        self.parameters = parameters(lists.clones(self.scaled))
        self.scaler, self.optimizer = launch(device, self.parameters)
        self.clips = clips
        self.scaler.scale(torch.zeros((), device=device))

    def prepare(self) -> None:
        """Write the gradients; torch unscales them in place."""
        torch._foreach_copy_([parameter.grad for parameter in self.parameters], self.scaled)

    def run(self) -> None:
        if self.clips and hasattr(self.scaler, "clip_grad_norm_"):
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        elif self.clips:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(moment: torch.dtype, device: torch.device, parameters: list) -> tuple:
    scaler = amp_ext.GradScaler(device.type, init_scale=INIT_SCALE)
    return scaler, AdamW(parameters, lr=LR, exp_avg_dtype=moment, exp_avg_sq_dtype=moment)


def theirs(device: torch.device, parameters: list) -> tuple:
    scaler = torch.amp.GradScaler(device.type, init_scale=INIT_SCALE)
    return scaler, torch.optim.AdamW(parameters, lr=LR, fused=True)


def build(shapes: list[int], clips: bool, moment: torch.dtype, setup: Setup) -> Trial:
    device = setup.device
    lines = providers.lines(partial(ours, moment), theirs, device)

    def timed(provider: Provider) -> Provider:
        training = Training(provider.launch, shapes, clips, device)
        return replace(provider, launch=training.run, prepare=training.prepare)

    def verify_line(provider: Provider) -> None:
        pair = provider.launch, theirs
        verify(*(Training(launch, shapes, clips, device) for launch in pair))

    work = Work(bytes=bytes_of(moment) * sum(shapes), parameters=sum(shapes))
    return Trial(lines, verify_line, work, timed, [BASELINE])


def verify(mine: Training, theirs: Training) -> None:
    """Expect torch's parameters, and no step by a gradient with an infinity.

    A step moves an element by about LR. Rounding of its moments to bfloat16 (8 bits) moves their
    quotient by less than 2**-7 of it. In FP32 the norm is off by a few units in the last place.
    """
    for poison in (*STEPS * [None], torch.inf):
        for training in (mine, theirs):
            training.prepare()
            if poison is not None:
                training.parameters[-1].grad[-1] = poison
            training.run()
    distance = max(
        (own.detach() - other.detach()).abs().max().item()
        for own, other in zip(mine.parameters, theirs.parameters, strict=True)
    )
    limit = STEPS * LR * 2.0**-7
    check(distance <= limit, f"parameters are {distance:.1e} from torch's, expected {limit:.1e}")
    scales = mine.scaler.get_scale(), theirs.scaler.get_scale()
    check(scales[0] == scales[1], f"the scale is {scales[0]}, torch's {scales[1]}")


def cases(setup: Setup) -> list[Case]:
    if not setup.dtypes(FP32):
        return []
    large, small = lists.named([(50, 64 * KI if setup.quick else MI), (4000, 4)])
    rows = [
        (large, False, FP32, ""),
        (large, True, FP32, ", clipped"),
        (large, True, BF16, ", clipped, BF16 moments"),
        (small, False, FP32, ""),
        (small, True, FP32, ", clipped"),
    ]
    return [
        Case(f"{name}{words}", partial(build, shapes, clips, moment, setup))
        for (name, shapes), clips, moment, words in rows
    ]


OP = Op(
    name="step",
    notes="GradScaler and AdamW on FP32 parameters, torch's fused; sizes in elements. Gradients "
    "are written anew before every step, untimed. GB/s counts the bytes that amp_ext moves: "
    f"{bytes_of(FP32)} a parameter, {bytes_of(BF16)} with BF16 moments; torch.amp moves 40, and 48 "
    "where it clips.",
    rate="GB/s",
    host=False,
    limit=lists.in_place_limit,
    cases=cases,
)
