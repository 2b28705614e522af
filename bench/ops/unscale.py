"""unscale_: multiply a list of gradients by a scalar in place and look for infinities and NaNs."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import GradientList, Gradients, in_place_limit
from harness.providers import Line
from harness.registry import BF16, FP16, FP32, Case, Op, Setup, Trial, check

FACTORS = 2.0, 0.5  # gradients stay what they are


def ours(grads: Gradients, flag: Tensor, factor: Tensor) -> None:
    ops.unscale_(grads.flat, flag, factor)


def theirs(grads: Gradients, flag: Tensor, factor: Tensor) -> None:
    """torch's op as torch.amp.GradScaler calls it: once for every dtype."""
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)


def composed(grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> None:
    """The same of torch's ordinary ops, for torch.compile to fuse."""
    torch._foreach_mul_(grads, inv_scale)
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    flag.copy_(torch.maximum(flag, (~finite).float()))


def build(case: GradientList, setup: Setup) -> Trial:
    """Gradients are doubled and halved in turn."""
    lines = providers.lines(ours, theirs, setup.device)
    return lists.build(case, setup, lines, verify, composed, FACTORS, passes=2)


def verify(line: Line, grads: Gradients) -> None:
    """Values are those of a product rounded once; found_inf is right with one infinity too."""
    device = grads.flat[0].device
    factor = torch.tensor(1 / 3000, device=device)
    for last in (None, torch.inf):
        mine = grads.clone()
        if last is not None:
            mine.spoil_last(last)
        expected = [(grad.float() * factor).to(grad.dtype) for grad in mine.flat]
        flag = lists.new_flag(device)
        line.launch(mine, flag, factor)
        wrong = lists.different(mine.flat, expected)
        check(wrong == 0, f"values are wrong in {wrong} of {len(expected)} tensors")
        words = "finite gradients" if last is None else "an infinity"
        check((flag.item() != 0) == (last is not None), f"found_inf is {flag.item()} for {words}")


def cases(setup: Setup) -> list[Case]:
    # torch's CUDA op takes no bfloat16.
    mixed = (FP32, FP16) if setup.on_gpu else (FP32, FP16, BF16)
    if setup.on_gpu and setup.dtype == BF16:
        return []
    return lists.cases(setup, mixed, build)


OP = Op(
    name="unscale",
    notes=(
        "Contiguous .grad tensors of parameters, sizes in elements; inv_scale is 2.0 and 0.5 in "
        "turn; nothing is subtracted. GB/s counts one read and one write of every gradient.",
    ),
    rate="GB/s",
    host=False,
    limit=in_place_limit,
    cases=cases,
)
