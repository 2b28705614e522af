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
from ops.scaler import Loop

LR, STEPS = 1e-3, 3


def bytes_of(moment: torch.dtype) -> int:
    """Return the bytes that amp_ext moves for a parameter with two moments of a dtype.

    A gradient is read by the check and by the step; weight and moments are read and written.
    torch.amp's fused AdamW moves 40 bytes, and 48 where it clips.
    """
    gradient, weight = 2 * 4, 2 * 4
    return gradient + weight + 2 * 2 * moment.itemsize


def ours(moment: torch.dtype, device_type: str, scale: float, parameters: list) -> tuple:
    scaler = amp_ext.GradScaler(device_type, init_scale=scale)
    return scaler, AdamW(parameters, lr=LR, exp_avg_dtype=moment, exp_avg_sq_dtype=moment)


def theirs(device_type: str, scale: float, parameters: list) -> tuple:
    scaler = torch.amp.GradScaler(device_type, init_scale=scale)
    return scaler, torch.optim.AdamW(parameters, lr=LR, fused=True)


def build(shapes: list[int], clips: bool, moment: torch.dtype, setup: Setup) -> Trial:
    def loop(make: Callable[..., tuple]) -> Loop:
        return Loop(make, shapes, clips, False, setup.device)

    def timed(provider: Provider) -> Provider:
        own = loop(provider.launch)
        return replace(provider, launch=own.run, prepare=own.prepare)

    return Trial(
        providers.lines(partial(ours, moment), theirs, setup.device),
        lambda provider: verify(loop(provider.launch), loop(theirs)),
        Work(bytes=bytes_of(moment) * sum(shapes), parameters=sum(shapes)),
        timed,
        unchecked=[BASELINE],
    )


def verify(mine: Loop, theirs: Loop) -> None:
    """Expect torch's parameters, and no step by a gradient with an infinity.

    A step moves an element by about LR. Rounding of its moments to bfloat16 (8 bits) moves their
    quotient by less than 2**-7 of it. In FP32 the norm is off by a few units in the last place.
    """
    for poison in (*STEPS * [None], torch.inf):
        for loop in (mine, theirs):
            loop.prepare(poison)
            loop.run()
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
