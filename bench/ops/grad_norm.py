"""grad_norm: the L2 norm of unscaled gradients, and whether all are finite, in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import GradientList, Gradients, read_limit
from harness.providers import Line
from harness.registry import BF16, FP16, FP32, Case, Op, Setup, Trial, check

INV_SCALE = 1 / 65536
# amp_ext rounds each product to float32, sums in float64 and rounds the root: twice half a unit.
OURS_RTOL = 2 * 2.0**-24
# The others add float32 squares up in orders of their own. Their precision is not on trial.
OTHERS_RTOL = 0.01


def ours(grads: Gradients, flag: Tensor, inv_scale: Tensor) -> Tensor:
    return ops.grad_norm(grads.flat, flag, inv_scale)


def of_list(grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> Tensor:
    """As torch.nn.utils.get_total_norm, in float32; one division less than unscaling first."""
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    norm = torch.linalg.vector_norm(norms) * inv_scale
    flag.copy_(torch.maximum(flag, (~norm.isfinite()).float()))
    return norm


def theirs(grads: Gradients, flag: Tensor, inv_scale: Tensor) -> Tensor:
    if len(grads.groups) == 1:
        return of_list(grads.flat, flag, inv_scale)
    groups = [of_list(group, flag, inv_scale) for group in grads.groups]
    return torch.linalg.vector_norm(torch.stack(groups))


def build(case: GradientList, setup: Setup) -> Trial:
    lines = providers.lines(ours, theirs, setup.device)
    composed = of_list if case.dtype else None
    return lists.build(case, setup, lines, verify, composed, [INV_SCALE])


def exact_norm(grads: Gradients) -> float:
    """In float64, of the products."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.flat]
    return torch.linalg.vector_norm(torch.stack(norms)).item() * INV_SCALE


def verify(line: Line, grads: Gradients) -> None:
    """Norms are right; the last element, made the largest, is in them; an infinity is found."""
    device = grads.flat[0].device
    inv_scale = torch.tensor(INV_SCALE, device=device)
    rtol = OURS_RTOL if line.launch is ours else OTHERS_RTOL
    for last in (None, 1000.0, torch.inf):
        given = grads.clone()
        if last is not None:
            given.spoil_last(last)
        flag = lists.new_flag(device)
        norm = line.launch(given, flag, inv_scale).item()
        if last == torch.inf:
            check(flag.item() != 0, "found_inf is 0 for an infinity")
            check(norm == torch.inf, f"the norm is {norm} for an infinity")
        else:
            check(flag.item() == 0, f"found_inf is {flag.item()} for finite gradients")
            exact = exact_norm(given)
            error = abs(norm - exact) / exact
            check(error <= rtol, f"the norm is {norm:.9g}, not {exact:.9g}")


def cases(setup: Setup) -> list[Case]:
    return lists.cases(setup, (FP32, FP16, BF16), build)


OP = Op(
    name="grad_norm",
    notes=(
        "The norm of gradients / 65536 and the check for overflow, read only. torch is "
        "torch._foreach_norm in float32, the norm of these, times inv_scale, and a check of that. "
        "GB/s counts one read of every gradient.",
    ),
    rate="GB/s",
    host=False,
    limit=read_limit,
    cases=cases,
)
