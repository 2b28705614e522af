"""check_finite: look for infinities and NaNs in a list of gradients, and write to none."""

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

NORMS = "inf norms"
Launch = Callable[[Gradients, Tensor], object]


def ours(grads: Gradients, flag: Tensor) -> None:
    ops.check_finite(grads.flat, flag)


def theirs(one: Tensor, grads: Gradients, flag: Tensor) -> None:
    """As torch.amp.GradScaler checks gradients for optimizers that unscale: it multiplies by 1."""
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, one)


def by_norms(grads: Gradients, flag: Tensor) -> None:
    """Reads alone: the largest magnitude of each tensor, then a check of these."""
    norms = [torch.stack(torch._foreach_norm(group, torch.inf)) for group in grads.groups]
    finite = torch.stack([group.isfinite().all() for group in norms]).all()
    flag.copy_(torch.maximum(flag, (~finite).float()))


def composed(grads: list[Tensor], flag: Tensor) -> None:
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    flag.copy_(torch.maximum(flag, (~finite).float()))


def lines(case: GradientList, setup: Setup) -> dict[str, tuple[Launch, Callable]]:
    """How each provider is launched, and within what."""
    device, plain = setup.device, providers.nullcontext
    made = {name: (ours, around) for name, around in providers.ours(device).items()}
    if not setup.on_gpu or BF16 not in case.dtypes:  # torch's CUDA op takes no bfloat16
        made[BASELINE] = partial(theirs, torch.ones((), device=device)), plain
    if setup.on_gpu or setup.quick:  # on a CPU ten times as slow
        made[NORMS] = by_norms, plain
    if case.compiles(setup):

        def run(program: Callable) -> None:
            program(case.make(device).flat, torch.zeros(1, device=device))

        if program := providers.compiled(composed, run):
            made[providers.COMPILE] = lambda grads, flag: program(grads.flat, flag), plain
    return made


def build(case: GradientList, setup: Setup) -> Trial:
    grads = case.make(setup.device)
    sets = rotated(grads, grads.bytes, Gradients.clone, setup.device)
    turns = itertools.cycle(sets)
    made = lines(case, setup)
    flags = {name: torch.zeros(1, device=setup.device) for name in made}

    def verify_all() -> None:
        for name, flag in flags.items():
            check(flag.item() == 0, f"{name} raised found_inf for finite gradients")
        for name, (launch, around) in made.items():
            verify(name, launch, around, grads)

    return Trial(
        tuple(
            Provider(name, lambda f=launch, name=name: f(next(turns), flags[name]), around=around)
            for name, (launch, around) in made.items()
        ),
        verify_all,
        Work(bytes=grads.bytes),
        alive=sets,
    )


def verify(name: str, launch: Launch, around: Callable, grads: Gradients) -> None:
    """found_inf is raised by one infinity and by one NaN; gradients stay as they are."""
    for last in (None, torch.inf, torch.nan):
        spoiled = grads.clone()
        if last is not None:
            spoiled.spoil_last(last)
        before = spoiled.clone()
        flag = torch.zeros(1, device=grads.flat[0].device)
        with around():
            launch(spoiled, flag)
        words = "finite gradients" if last is None else f"one {last}"
        check(flag.item() == (last is not None), f"{name}: found_inf is {flag.item()} for {words}")
        pairs = zip(spoiled.flat, before.flat, strict=True)
        wrong = sum(not a.allclose(b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
        check(wrong == 0, f"{name} has written to {wrong} tensors")


def cases(setup: Setup) -> list[Case]:
    mixed = (FP32, FP16) if setup.on_gpu else (FP32, FP16, BF16)
    missing = setup.on_gpu and setup.dtype == BF16
    return [
        Case(case.name, partial(build, case, setup), case.counted, NORMS if missing else BASELINE)
        for case in gradient_lists(setup, mixed)
    ]


OP = Op(
    name="check",
    notes=(
        "Contiguous .grad tensors of parameters, sizes in elements; nothing is subtracted. torch "
        "multiplies by 1 in place, as its GradScaler does for optimizers that unscale; inf norms "
        "are torch._foreach_norm's, which only reads. GB/s counts one read of every gradient.",
    ),
    rate="GB/s",
    host=False,
    limit=read_limit,
    cases=cases,
)
