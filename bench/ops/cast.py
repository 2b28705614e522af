"""Time cast_: copy a list of tensors into another dtype, as weights into their FP16 copies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import KI, MI, clones
from harness.registry import BF16, FP16, FP32, NAMES, Case, Op, Provider, Setup, Trial, Work, check
from workloads.gradients import Shape, gpt2_shapes, gradients

Pair = tuple[list[Tensor], list[Tensor]]  # outputs and inputs


def ours(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    ops.cast_(outputs, inputs)


def theirs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(outputs, inputs)


def build(shapes: Sequence[Shape], source: torch.dtype, target: torch.dtype, setup: Setup) -> Trial:
    """Make a trial where all providers read the same inputs and write the same outputs."""
    inputs = gradients(shapes, source, setup.device)
    outputs = [torch.empty_like(tensor, dtype=target) for tensor in inputs]
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def copy(pair: Pair) -> Pair:
        return clones(pair[0]), clones(pair[1])

    turns = itertools.cycle(lists.rotated((outputs, inputs), moved, copy, setup.device))

    def timed(provider: Provider) -> Provider:
        return replace(provider, launch=lambda: provider.launch(*next(turns)))

    def verify(provider: Provider) -> None:
        """Expect every bit of tensor.to(dtype)."""
        fresh = gradients(shapes, source, setup.device)
        expected = [tensor.to(target) for tensor in fresh]
        results = [torch.zeros_like(tensor) for tensor in expected]
        provider.launch(results, fresh)
        wrong = lists.different(results, expected)
        check(wrong == 0, f"{wrong} of {len(results)} tensors are wrong")

    return Trial(providers.lines(ours, theirs, setup.device), verify, Work(bytes=moved), timed)


def cases(setup: Setup) -> list[Case]:
    """Return lists and dtypes; --dtype is the 16-bit side's, or fp32 for the outputs."""
    half = setup.dtype if setup.dtype in (FP16, BF16) else FP16
    large = lists.named([(16, 64 * KI if setup.quick else 4 * MI)])[0]
    if setup.sizes:
        pair = (half, FP32) if setup.dtype == FP32 else (FP32, half)
        chosen = [(*each, *pair) for each in lists.named(setup.sizes)]
    else:
        chosen = [
            ("4000 x 100", 4000 * [100], FP32, half),
            *((*large, FP32, FP16), (*large, FP32, BF16), (*large, half, FP32)),
            (*gpt2_shapes(setup.quick), FP32, half),
            ("300 x 10000", 300 * [10000], FP32, half),
            ("2 x 10", 2 * [10], FP32, half),
        ]
        if setup.dtype:
            sides = slice(3, None) if setup.dtype == FP32 else slice(2, None)
            chosen = [each for each in chosen if setup.dtype in each[sides]]
    return [
        Case(
            f"{name} {NAMES[source]} to {NAMES[target]}",
            partial(build, shapes, source, target, setup),
            counted=len(shapes) > 2 or bool(setup.sizes),
        )
        for name, shapes, source, target in chosen
    ]


OP = Op(
    name="cast",
    notes="Contiguous tensors, sizes in elements; torch is torch._foreach_copy_. GB/s counts every "
    "byte read and written.",
    rate="GB/s",
    host=False,
    limit=lists.copy_limit,
    cases=cases,
    axis="sizes",
)
