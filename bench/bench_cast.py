"""cast_: copy a list of tensors into one of another dtype, as weights into their FP16 copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from amp_ext import ops, testing
from bench_unscale import KI, MI, binary, limit
from registry import BASELINE, OURS, Case, Op, Provider, Trial, check


def ours(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    ops.cast_(outputs, inputs)


def theirs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(outputs, inputs)


def build(
    shapes: Sequence[testing.Shape],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> Trial:
    """Both providers read the same inputs and write the same outputs."""
    dtype, output_dtype = dtypes
    inputs = testing.gradients(shapes, dtype, device)
    outputs = [torch.empty_like(source, dtype=output_dtype) for source in inputs]
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def verify() -> None:
        for launch in (ours, theirs):
            for output in outputs:
                output.zero_()
            launch(outputs, inputs)
            pairs = zip(outputs, inputs, strict=True)
            wrong = sum(not output.equal(source.to(output.dtype)) for output, source in pairs)
            check(wrong == 0, f"{launch.__name__}: {wrong} of {len(inputs)} tensors are wrong")

    providers = (
        Provider(OURS, lambda: ours(outputs, inputs)),
        Provider(BASELINE, lambda: theirs(outputs, inputs)),
    )
    return Trial(providers, verify, bytes=moved)


def cases(device: torch.device, quick: bool) -> list[Case]:
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    large = 64 * KI if quick else 4 * MI
    gpt2_name, gpt2 = "GPT-2 small, 148 tensors", testing.gpt2_small_shapes()
    if quick:
        gpt2_name = "GPT-2 small at 1/32 width"
        gpt2 = testing.gpt2_small_shapes(width=24, vocabulary=1571, positions=32)
    lists = [
        ("4000 x 100 fp32 to fp16", 4000 * [100], (fp32, fp16)),
        (f"16 x {binary(large)} fp32 to fp16", 16 * [large], (fp32, fp16)),
        (f"16 x {binary(large)} fp32 to bf16", 16 * [large], (fp32, bf16)),
        (f"16 x {binary(large)} fp16 to fp32", 16 * [large], (fp16, fp32)),
        (f"{gpt2_name}, to fp16", gpt2, (fp32, fp16)),
        ("300 x 10000 fp32 to fp16", 300 * [10000], (fp32, fp16)),
        ("2 x 10 fp32 (not counted)", 2 * [10], (fp32, fp16)),
    ]
    return [
        Case(name, partial(build, shapes, dtypes, device), counted="not counted" not in name)
        for name, shapes, dtypes in lists
    ]


OP = Op(
    name="cast",
    notes=(
        "Contiguous tensors, sizes in elements, the same ones every time; torch is "
        "torch._foreach_copy_; nothing is subtracted. GB/s counts every byte read and written.",
    ),
    rate="GB/s",
    host=False,
    limit=limit,
    cases=cases,
)
