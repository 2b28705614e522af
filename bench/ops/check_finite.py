"""Time check_finite: look for infinities and NaNs in a list of gradients, and write to none."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import Gradients
from harness.registry import BASELINE, BF16, FP16, FP32, Case, Op, Provider, Setup, Trial, check

NORMS = "inf norms"


def ours(grads: Gradients, flag: Tensor, one: Tensor) -> None:
    ops.check_finite(grads.flat, flag)


def theirs(grads: Gradients, flag: Tensor, one: Tensor) -> None:
    """Multiply by 1, as torch.amp.GradScaler does for optimizers that unscale."""
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, one)


def by_norms(grads: Gradients, flag: Tensor, one: Tensor) -> None:
    """Check the largest magnitude of each tensor by reads alone."""
    norms = [torch.stack(torch._foreach_norm(group, torch.inf)) for group in grads.groups]
    finite = torch.stack([norm.isfinite().all() for norm in norms]).all()
    flag.copy_(torch.maximum(flag, (~finite).float()))


def build(shapes: list, dtypes: tuple, setup: Setup) -> Trial:
    lines = providers.lines(ours, theirs, setup.device)
    if setup.on_gpu and BF16 in dtypes:  # torch's CUDA op takes no bfloat16
        lines.pop()
    if setup.on_gpu or setup.quick:  # on a CPU ten times as slow
        lines.append(Provider(NORMS, by_norms))
    return lists.build(shapes, dtypes, setup, lines, verify)


def verify(line: Provider, grads: Gradients) -> None:
    """Expect found_inf for one infinity and for one NaN, and gradients as they were."""
    device = grads.flat[0].device
    one = torch.tensor(1.0, device=device)
    for last in (None, torch.inf, torch.nan):
        spoiled, flag = grads.with_last(last), lists.new_flag(device)
        before = spoiled.clone()
        line.launch(spoiled, flag, one)
        words = "finite gradients" if last is None else f"one {last}"
        check(flag.item() == (last is not None), f"found_inf is {flag.item()} for {words}")
        wrong = lists.different(spoiled.flat, before.flat)
        check(wrong == 0, f"{wrong} tensors were written to")


def cases(setup: Setup) -> list[Case]:
    mixed = (FP32, FP16) if setup.on_gpu else (FP32, FP16, BF16)
    baseline = NORMS if setup.on_gpu and setup.dtype == BF16 else BASELINE
    return lists.cases(setup, mixed, build, baseline)


OP = Op(
    name="check_finite",
    notes="Contiguous gradients, sizes in elements. torch multiplies by 1 in "
    "place, as its GradScaler does for optimizers that unscale; inf norms are "
    "torch._foreach_norm's, which only reads. GB/s counts one read of every gradient.",
    rate="GB/s",
    host=False,
    limit=lists.read_limit,
    cases=cases,
    axis="sizes",
)
