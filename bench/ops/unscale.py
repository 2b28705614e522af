"""Time unscale_: multiply a list of gradients in place and look for infinities and NaNs."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import Gradients
from harness.registry import BF16, FP16, FP32, Case, Op, Provider, Setup, Trial, check

FACTORS = 2.0, 0.5  # gradients stay unchanged


def ours(grads: Gradients, flag: Tensor, factor: Tensor) -> None:
    ops.unscale_(grads.flat, flag, factor)


def theirs(grads: Gradients, flag: Tensor, factor: Tensor) -> None:
    """Call torch's op as torch.amp.GradScaler does, once for every dtype."""
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)


def build(shapes: list, dtypes: tuple, setup: Setup) -> Trial:
    lines = providers.lines(ours, theirs, setup.device)
    return lists.build(shapes, dtypes, setup, lines, verify, FACTORS, passes=2)


def verify(line: Provider, grads: Gradients) -> None:
    """Expect products rounded once, and found_inf for one infinity."""
    device = grads.flat[0].device
    factor = torch.tensor(1 / 3000, device=device)
    for last in (None, torch.inf):
        mine, flag = grads.with_last(last), lists.new_flag(device)
        expected = [(grad.float() * factor).to(grad.dtype) for grad in mine.flat]
        line.launch(mine, flag, factor)
        wrong = lists.different(mine.flat, expected)
        check(wrong == 0, f"values are wrong in {wrong} of {len(expected)} tensors")
        words = "finite gradients" if last is None else "an infinity"
        check((flag.item() != 0) == (last is not None), f"found_inf is {flag.item()} for {words}")


def cases(setup: Setup) -> list[Case]:
    if setup.on_gpu and setup.dtype == BF16:  # torch's CUDA op takes no bfloat16
        return []
    return lists.cases(setup, (FP32, FP16) if setup.on_gpu else (FP32, FP16, BF16), build)


OP = Op(
    name="unscale",
    notes="Contiguous gradients, sizes in elements; inv_scale is 2.0 and 0.5 in "
    "turn. GB/s counts one read and one write of every gradient.",
    rate="GB/s",
    host=False,
    limit=lists.in_place_limit,
    cases=cases,
    axis="sizes",
)
