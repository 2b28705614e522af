"""Time grad_norm: the L2 norm of unscaled gradients and their check, in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_ext import ops
from harness import lists, providers
from harness.lists import Gradients
from harness.registry import BF16, FP16, FP32, Case, Op, Provider, Setup, Trial, check

INV_SCALE = 1 / 65536
# amp_ext rounds each product to float32, sums in float64 and rounds the root: twice half a unit.
OURS_RTOL = 2 * 2.0**-24
# The others add float32 squares up in orders of their own. Their precision is not on trial.
OTHERS_RTOL = 0.01


def ours(grads: Gradients, flag: Tensor, inv_scale: Tensor) -> Tensor:
    return ops.grad_norm(grads.flat, flag, inv_scale)


def norm_of(grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> Tensor:
    """Call torch.nn.utils.get_total_norm's ops in float32, one division less than unscaling."""
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    norm = torch.linalg.vector_norm(norms) * inv_scale
    flag.copy_(torch.maximum(flag, (~norm.isfinite()).float()))
    return norm


def theirs(grads: Gradients, flag: Tensor, inv_scale: Tensor) -> Tensor:
    norms = [norm_of(group, flag, inv_scale) for group in grads.groups]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def build(shapes: list, dtypes: tuple, setup: Setup) -> Trial:
    lines = providers.lines(ours, theirs, setup.device)
    return lists.build(shapes, dtypes, setup, lines, verify, [INV_SCALE])


def exact_norm(grads: Gradients) -> float:
    """Compute the norm in float64."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.flat]
    return torch.linalg.vector_norm(torch.stack(norms)).item() * INV_SCALE


def verify(line: Provider, grads: Gradients) -> None:
    """Expect right norms, the last element in them, and an infinity found."""
    device = grads.flat[0].device
    inv_scale = torch.tensor(INV_SCALE, device=device)
    rtol = OURS_RTOL if line.launch is ours else OTHERS_RTOL
    for last in (None, 1000.0, torch.inf):
        given, flag = grads.with_last(last), lists.new_flag(device)
        norm = line.launch(given, flag, inv_scale).item()
        infinite = last == torch.inf
        check((flag.item() != 0) == infinite, f"found_inf is {flag.item()}, the last is {last}")
        exact = exact_norm(given)
        right = norm == exact if infinite else abs(norm - exact) <= rtol * exact
        check(right, f"the norm is {norm:.9g}, not {exact:.9g}")


def cases(setup: Setup) -> list[Case]:
    return lists.cases(setup, (FP32, FP16, BF16), build)


OP = Op(
    name="grad_norm",
    notes="The norm of gradients / 65536 and the check for overflow, read only. torch is "
    "torch._foreach_norm in float32, the norm of these, times inv_scale, and a check of that. "
    "GB/s counts one read of every gradient.",
    rate="GB/s",
    host=False,
    limit=lists.read_limit,
    cases=cases,
    axis="sizes",
)
