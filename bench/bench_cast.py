"""cast_: copy a list of tensors into one of another dtype, as weights into their FP16 copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import providers
from amp_ext import ops, testing
from lists import KI, MI, binary, copy_limit, gpt2_shapes, rotated
from registry import (
    BASELINE,
    BF16,
    FP16,
    FP32,
    NAMES,
    Case,
    Op,
    Provider,
    Setup,
    Trial,
    Work,
    check,
)

Pair = tuple[list[Tensor], list[Tensor]]  # outputs and inputs


def ours(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    ops.cast_(outputs, inputs)


def theirs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(outputs, inputs)


def build(
    shapes: Sequence[testing.Shape], source: torch.dtype, target: torch.dtype, setup: Setup
) -> Trial:
    """All providers read the same inputs and write the same outputs."""
    inputs = testing.gradients(shapes, source, setup.device)
    outputs = [torch.empty_like(tensor, dtype=target) for tensor in inputs]
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def copy(pair: Pair) -> Pair:
        return tuple([tensor.clone() for tensor in tensors] for tensors in pair)

    turns = itertools.cycle(rotated((outputs, inputs), moved, copy, setup.device))
    made = {name: (ours, around) for name, around in providers.ours(setup.device).items()}
    made[BASELINE] = theirs, providers.nullcontext

    def verify_all() -> None:
        for name, (launch, around) in made.items():
            with around():
                verify(name, launch, outputs, inputs)

    return Trial(
        tuple(
            Provider(name, lambda launch=launch: launch(*next(turns)), around=around)
            for name, (launch, around) in made.items()
        ),
        verify_all,
        Work(bytes=moved),
    )


def verify(
    name: str, launch: Callable[..., object], outputs: list[Tensor], inputs: list[Tensor]
) -> None:
    """Every bit is that of tensor.to(dtype)."""
    for output in outputs:
        output.zero_()
    launch(outputs, inputs)
    pairs = zip(outputs, inputs, strict=True)
    wrong = sum(not output.equal(tensor.to(output.dtype)) for output, tensor in pairs)
    check(wrong == 0, f"{name}: {wrong} of {len(inputs)} tensors are wrong")


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
    made = []
    for name, shapes, source, target in lists:
        if wanted(setup, source, target):
            counted = len(shapes) > 2
            words = f"{name} {NAMES[source]} to {NAMES[target]}"
            made.append(Case(words, partial(build, shapes, source, target, setup), counted))
    return made


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
