"""cast_: copy a list of tensors into one of another dtype, as weights into their FP16 copies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from amp_ext import ops
from harness import providers
from harness.lists import KI, MI, binary, clones, copy_limit, different, rotated
from harness.providers import Line
from harness.registry import BF16, FP16, FP32, NAMES, Case, Op, Provider, Setup, Trial, Work, check
from workloads.gradients import Shape, gpt2_shapes, gradients

Pair = tuple[list[Tensor], list[Tensor]]  # outputs and inputs


def ours(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    ops.cast_(outputs, inputs)


def theirs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(outputs, inputs)


def build(shapes: Sequence[Shape], source: torch.dtype, target: torch.dtype, setup: Setup) -> Trial:
    """All providers read the same inputs and write the same outputs."""
    inputs = gradients(shapes, source, setup.device)
    outputs = [torch.empty_like(tensor, dtype=target) for tensor in inputs]
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def copy(pair: Pair) -> Pair:
        outputs, inputs = pair
        return clones(outputs), clones(inputs)

    turns = itertools.cycle(rotated((outputs, inputs), moved, copy, setup.device))

    def timed(name: str, line: Line) -> Provider:
        return Provider(name, lambda: line.launch(*next(turns)), around=line.around)

    def verify(name: str, line: Line) -> None:
        """Every bit is that of tensor.to(dtype)."""
        fresh = gradients(shapes, source, setup.device)
        expected = [tensor.to(target) for tensor in fresh]
        results = [torch.zeros_like(tensor) for tensor in expected]
        line.launch(results, fresh)
        wrong = different(results, expected)
        check(wrong == 0, f"{wrong} of {len(results)} tensors are wrong")

    lines = providers.lines(ours, theirs, setup.device)
    return providers.trial(lines, timed, verify, Work(bytes=moved))


def wanted(setup: Setup, source: torch.dtype, target: torch.dtype) -> bool:
    """--dtype is that of the 16-bit side, or fp32 of the outputs."""
    if setup.dtype == FP32:
        return target == FP32
    return setup.dtype in (None, source, target)


def cases(setup: Setup) -> list[Case]:
    large = 64 * KI if setup.quick else 4 * MI
    gpt2_name, gpt2 = gpt2_shapes(setup.quick)
    half = setup.dtype if setup.dtype in (FP16, BF16) else FP16
    lists = [
        ("4000 x 100", 4000 * [100], FP32, half),
        (f"16 x {binary(large)}", 16 * [large], FP32, FP16),
        (f"16 x {binary(large)}", 16 * [large], FP32, BF16),
        (f"16 x {binary(large)}", 16 * [large], half, FP32),
        (gpt2_name, gpt2, FP32, half),
        ("300 x 10000", 300 * [10000], FP32, half),
        ("2 x 10", 2 * [10], FP32, half),
    ]
    return [
        Case(
            f"{name} {NAMES[source]} to {NAMES[target]}",
            partial(build, shapes, source, target, setup),
            counted=len(shapes) > 2,
        )
        for name, shapes, source, target in lists
        if wanted(setup, source, target)
    ]


OP = Op(
    name="cast",
    notes=(
        "Contiguous tensors, sizes in elements; torch is torch._foreach_copy_; nothing is "
        "subtracted. GB/s counts every byte read and written.",
    ),
    rate="GB/s",
    host=False,
    limit=copy_limit,
    cases=cases,
)
