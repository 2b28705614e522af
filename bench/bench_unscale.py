"""unscale_: multiply a list of gradients by a scalar in place and look for infinities and NaNs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import providers
from amp_ext import ops
from lists import GradientList, Gradients, copy_limit, gradient_lists, rotated
from registry import BASELINE, BF16, FP16, FP32, Case, Op, Provider, Setup, Trial, Work, check


class Factor(NamedTuple):
    """inv_scale, on the device and on the host."""

    tensor: Tensor
    value: float

    @classmethod
    def of(cls, value: float, device: torch.device) -> Factor:
        return cls(torch.tensor(value, device=device), value)


Launch = Callable[[Gradients, Tensor, Factor], object]


def ours(grads: Gradients, flag: Tensor, factor: Factor) -> None:
    ops.unscale_(grads.flat, flag, factor.tensor)


def theirs(grads: Gradients, flag: Tensor, factor: Factor) -> None:
    """torch's op as torch.amp.GradScaler calls it: once for every dtype."""
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor.tensor)


def composed(grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> None:
    """The same of torch's ordinary ops, for torch.compile to fuse."""
    torch._foreach_mul_(grads, inv_scale)
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    flag.copy_(torch.maximum(flag, (~finite).float()))


def by_apex(library: providers.Apex, grads: Gradients, flag: Tensor, factor: Factor) -> None:
    """Takes the factor from the host, as its own loss scaler does."""
    library.unscale(grads.groups, flag, factor.value)


class Line(NamedTuple):
    """A provider: how it is launched, within what, and the dtype of its flag."""

    launch: Launch
    around: Callable[[], object]
    flag: torch.dtype = FP32

    def new_flag(self, device: torch.device) -> Tensor:
        return torch.zeros(1, dtype=self.flag, device=device)


def lines(case: GradientList, setup: Setup) -> dict[str, Line]:
    made = {name: Line(ours, around) for name, around in providers.ours(setup.device).items()}
    made[BASELINE] = Line(theirs, providers.nullcontext)
    if case.compiles(setup):

        def run(program: Callable) -> None:
            flag = torch.zeros(1, device=setup.device)
            program(case.make(setup.device).flat, flag, torch.tensor(0.5, device=setup.device))

        if program := providers.compiled(composed, run):
            made[providers.COMPILE] = Line(
                lambda grads, flag, factor: program(grads.flat, flag, factor.tensor),
                providers.nullcontext,
            )
    if (library := providers.apex(setup.device)) and BF16 not in case.dtypes:
        made[providers.APEX] = Line(
            partial(by_apex, library), providers.nullcontext, flag=torch.int32
        )
    return made


def build(case: GradientList, setup: Setup) -> Trial:
    """All providers work on the same gradients, which are doubled and halved in turn."""
    grads = case.make(setup.device)
    sets = rotated(grads, grads.bytes, Gradients.clone, setup.device)
    factors = [Factor.of(value, setup.device) for value in (2.0, 0.5)]
    turns = itertools.cycle([(grads, factor) for factor in factors for grads in sets])
    made = lines(case, setup)
    flags = {name: line.new_flag(setup.device) for name, line in made.items()}

    def provider(name: str, line: Line) -> Provider:
        def launch() -> None:
            grads, factor = next(turns)
            line.launch(grads, flags[name], factor)

        return Provider(name, launch, around=line.around)

    def verify_all() -> None:
        for name, flag in flags.items():
            check(flag.item() == 0, f"{name} raised found_inf for finite gradients")
        for name, line in made.items():
            verify(name, line, grads)

    made_providers = tuple(provider(name, line) for name, line in made.items())
    return Trial(made_providers, verify_all, Work(bytes=2 * grads.bytes), alive=sets)


def verify(name: str, line: Line, grads: Gradients) -> None:
    """Values are those of a product rounded once; found_inf is right with one infinity too."""
    device = grads.flat[0].device
    factor = Factor.of(1 / 3000, device)
    for last in (None, torch.inf):
        mine = grads.clone()
        if last is not None:
            mine.spoil_last(last)
        expected = [(grad.float() * factor.tensor).to(grad.dtype) for grad in mine.flat]
        flag = line.new_flag(device)
        with line.around():
            line.launch(mine, flag, factor)
        wrong = sum(not a.equal(b) for a, b in zip(mine.flat, expected, strict=True))
        check(wrong == 0, f"{name}: values are wrong in {wrong} of {len(expected)} tensors")
        check((flag.item() != 0) == (last is not None), f"{name}: found_inf is {flag.item()}")


def cases(setup: Setup) -> list[Case]:
    # torch's CUDA op takes no bfloat16.
    mixed = (FP32, FP16) if setup.on_gpu else (FP32, FP16, BF16)
    if setup.on_gpu and setup.dtype == BF16:
        return []
    return [
        Case(case.name, partial(build, case, setup), case.counted)
        for case in gradient_lists(setup, mixed)
    ]


OP = Op(
    name="unscale",
    notes=(
        "Contiguous .grad tensors of parameters, sizes in elements; inv_scale is 2.0 and 0.5 in "
        "turn; nothing is subtracted. GB/s counts one read and one write of every gradient.",
    ),
    rate="GB/s",
    host=False,
    limit=copy_limit,
    cases=cases,
)
