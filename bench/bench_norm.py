"""grad_norm: the L2 norm of unscaled gradients, and whether all are finite, in one read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import providers
from amp_ext import ops
from lists import GradientList, Gradients, gradient_lists, read_limit, rotated
from registry import BASELINE, BF16, FP16, FP32, Case, Op, Provider, Setup, Trial, Work, check

INV_SCALE = 1 / 65536
# amp_ext rounds each product to float32, sums in float64 and rounds the root: twice half a unit.
OURS_RTOL = 2 * 2.0**-24
# The others add float32 squares up in orders of their own. Their precision is not on trial.
OTHERS_RTOL = 0.01
Launch = Callable[[Gradients, Tensor, Tensor], Tensor]


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


def by_apex(library: providers.Apex, grads: Gradients, flag: Tensor, inv_scale: Tensor) -> Tensor:
    return library.norm(grads.groups, flag) * inv_scale


def lines(case: GradientList, setup: Setup) -> dict[str, tuple[Launch, Callable, torch.dtype]]:
    """How each provider is launched, within what, and the dtype of its flag."""
    plain = providers.nullcontext
    made = {name: (ours, around, FP32) for name, around in providers.ours(setup.device).items()}
    made[BASELINE] = theirs, plain, FP32
    if case.compiles(setup) and len(case.dtypes) == 1:

        def run(program: Callable) -> None:
            zero = torch.zeros(1, device=setup.device)
            program(case.make(setup.device).flat, zero, torch.ones((), device=setup.device))

        if program := providers.compiled(of_list, run):
            launch = lambda grads, flag, scale: program(grads.flat, flag, scale)  # noqa: E731
            made[providers.COMPILE] = launch, plain, FP32
    if library := providers.apex(setup.device):
        made[providers.APEX] = partial(by_apex, library), plain, torch.int32
    return made


def build(case: GradientList, setup: Setup) -> Trial:
    grads = case.make(setup.device)
    sets = rotated(grads, grads.bytes, Gradients.clone, setup.device)
    turns = itertools.cycle(sets)
    inv_scale = torch.tensor(INV_SCALE, device=setup.device)
    made = lines(case, setup)
    flags = {name: torch.zeros(1, dtype=d, device=setup.device) for name, (*_, d) in made.items()}

    def verify_all() -> None:
        for name, (launch, around, dtype) in made.items():
            check(flags[name].item() == 0, f"{name} raised found_inf for finite gradients")
            flag = torch.zeros(1, dtype=dtype, device=setup.device)
            rtol = OURS_RTOL if launch is ours else OTHERS_RTOL
            with around():
                verify(
                    name, lambda g, f=launch, flag=flag: f(g, flag, inv_scale), flag, grads, rtol
                )

    return Trial(
        tuple(
            Provider(
                name,
                lambda f=launch, flag=flags[name]: f(next(turns), flag, inv_scale),
                around=around,
            )
            for name, (launch, around, _) in made.items()
        ),
        verify_all,
        Work(bytes=grads.bytes),
        alive=sets,
    )


def exact_norm(grads: Gradients) -> float:
    """In float64, of the products."""
    squares = [(grad.double() * INV_SCALE).square().sum() for grad in grads.flat]
    return torch.stack(squares).sum().sqrt().item()


def verify(
    name: str,
    norm_of: Callable[[Gradients], Tensor],
    flag: Tensor,
    grads: Gradients,
    rtol: float,
) -> None:
    """Norms are right; the last element, made the largest, is in them; an infinity is found."""
    for last in (None, 1000.0, torch.inf):
        given = grads.clone()
        if last is not None:
            given.spoil_last(last)
        norm, exact = norm_of(given).item(), exact_norm(given)
        if last == torch.inf:
            check(flag.item() != 0, f"{name}: found_inf is 0 for an infinity")
            check(norm == torch.inf, f"{name}: the norm is {norm} for an infinity")
        else:
            check(flag.item() == 0, f"{name}: found_inf is {flag.item()} for finite gradients")
            error = abs(norm - exact) / exact
            check(error <= rtol, f"{name}: the norm is {norm:.9g}, not {exact:.9g}")


def cases(setup: Setup) -> list[Case]:
    return [
        Case(case.name, partial(build, case, setup), case.counted)
        for case in gradient_lists(setup, mixed=(FP32, FP16, BF16))
    ]


OP = Op(
    name="norm",
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
