"""Make the lists of gradients that the multi-tensor ops are timed on."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from harness.registry import BASELINE, FP32, NAMES, Case, Provider, Setup, Trial, Work, bound
from workloads.gradients import Shape, gpt2_shapes, gradient, gradients

KI, MI = 1 << 10, 1 << 20
UNITS = {"": 1, "Ki": KI, "Mi": MI}
L2_MULTIPLE = 3
MAX_COPIES = 1000
T = TypeVar("T")


class Gradients:
    """Hold gradients, whole and by dtype: torch's ops take one dtype at a time."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.flat = grads
        groups: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            groups.setdefault(grad.dtype, []).append(grad)
        self.groups = list(groups.values())

    def clone(self) -> Gradients:
        return Gradients(clones(self.flat))

    def with_last(self, value: float | None) -> Gradients:
        """Return a copy, its last element replaced by a value."""
        copy = self.clone()
        if value is not None:
            copy.flat[-1].view(-1)[-1] = value
        return copy


# ---- sizes -------------------------------------------------------------------------------------


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read "4000x100,1x64Mi" as pairs of a count and a size."""
    pairs = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)(Ki|Mi)?", part.strip())
        pair = match and (int(match[1]), int(match[2]) * UNITS[match[3] or ""])
        if not pair or not all(pair):
            raise argparse.ArgumentTypeError(f"expected COUNTxSIZE such as 16x4Mi, got {part!r}")
        pairs.append(pair)
    return tuple(pairs)


def binary(size: int) -> str:
    """Write a multiple of 1024 in words: 65536 is "64 Ki"."""
    if size % KI:
        return str(size)
    return f"{size // MI} Mi" if size % MI == 0 else f"{size // KI} Ki"


def named(pairs: Sequence[tuple[int, int]]) -> list[tuple[str, list[Shape]]]:
    """Name lists of equal tensors."""
    return [(f"{count} x {binary(size)}", count * [size]) for count, size in pairs]


def cases(
    setup: Setup,
    mixed: Sequence[torch.dtype],
    build: Callable[..., Trial],
    baseline: str = BASELINE,
) -> list[Case]:
    """Return an op's cases: many, few and mixed tensors, or the sizes of the command line.

    Args:
        setup: the choices of the command line.
        mixed: the dtypes of the list that has several.
        build: takes shapes, dtypes and the setup.
        baseline: the provider that ratios are to.
    """

    def case(name: str, shapes: list[Shape], *dtypes: torch.dtype, counted: bool = True) -> Case:
        dtype = dtypes[0] if len(dtypes) == 1 else None
        words = "+".join(NAMES[each] for each in dtypes)
        trial = partial(build, shapes, dtypes, setup)
        return Case(f"{name} {words}", trial, counted, baseline, dtype)

    if setup.sizes:
        dtype = setup.dtype or FP32
        return [case(name, shapes, dtype) for name, shapes in named(setup.sizes)]
    large, largest = (64 * KI, MI) if setup.quick else (4 * MI, 64 * MI)
    lists = named([(4000, 100), (16, large), (1, largest)])
    gpt2_name, gpt2 = gpt2_shapes(setup.quick)
    dtype = setup.dtype or FP32
    made = [case(*each, dtype) for each in [*lists, (f"{gpt2_name},", gpt2)]]
    if setup.dtype is None:
        made.append(case("300 x 10000", 300 * [10000], *mixed))
    return [*made, case("2 x 10", 2 * [10], dtype, counted=False)]


# ---- providers that take the same gradients ----------------------------------------------------


def build(
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    setup: Setup,
    lines: list[Provider],
    verify: Callable[[Provider, Gradients], None],
    factors: Sequence[float] = (1.0,),
    passes: int = 1,
) -> Trial:
    """Make a trial on the same gradients for all providers, with a flag for each.

    Args:
        shapes, dtypes, setup: of the gradients.
        lines: a launch takes Gradients, a flag [1] that non-finite values raise, and a factor [].
        verify: raises CheckError for a provider's wrong result on copies of gradients.
        factors: taken in turn, each for as many launches as there are sets of gradients.
        passes: how many times a launch has to move every byte of the gradients.
    """
    device = setup.device
    new = lambda: Gradients(gradients(shapes, dtypes, device))  # noqa: E731
    grads = new()
    size = sum(grad.nbytes for grad in grads.flat)
    sets = rotated(grads, size, Gradients.clone, device)
    tensors = [torch.tensor(value, device=device) for value in factors]
    turns = itertools.cycle([(each, factor) for factor in tensors for each in sets])

    def timed(provider: Provider) -> Provider:
        flag = new_flag(device)

        def launch() -> None:
            grads, factor = next(turns)
            provider.launch(grads, flag, factor)

        return replace(provider, launch=launch)

    fresh = cache(new)  # a wrong provider may have spoilt the timed ones
    return Trial(lines, lambda line: verify(line, fresh()), Work(bytes=passes * size), timed)


def new_flag(device: torch.device) -> Tensor:
    """Make a found_inf [1], not raised."""
    return torch.zeros(1, device=device)


def different(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Count the tensors that differ from their partner in a bit."""
    pairs = zip(tensors, others, strict=True)
    return sum(not a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs)


def rotated(first: T, size: int, copy: Callable[[T], T], device: torch.device) -> list[T]:
    """Return inputs to be used in turn, so many that a GPU's L2 cache holds none of them.

    A CPU gets `first` alone: gradients and activations are still in its caches when used.

    Args:
        first: inputs.
        size: of `first`, in bytes.
        copy: copies inputs.
        device: where the inputs lie.
    """
    copies = 0
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = min(MAX_COPIES, L2_MULTIPLE * l2_bytes // max(size, 1))
    return [first, *(copy(first) for _ in range(copies))]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy by few launches: one for each of thousands of tensors and sets would take seconds."""
    copied = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copied, list(tensors))
    return copied


# ---- limits ------------------------------------------------------------------------------------


def limit(setup: Setup, name: str, passes: int, op: Callable[[Tensor], Callable]) -> Case:
    """Make a first row: one large FP32 tensor, moved `passes` times by the function of `op`."""
    size = MI if setup.quick else 64 * MI
    make = lambda: op(gradient(size, device=setup.device))  # noqa: E731
    return bound(f"{name} {binary(size)} fp32", make, Work(bytes=4 * passes * size), FP32, name)


def copy_limit(setup: Setup) -> Case:
    """Copy memory: as many bytes read as written."""
    return limit(setup, "copy", 2, lambda source: partial(torch.empty_like(source).copy_, source))


def in_place_limit(setup: Setup) -> Case:
    """Multiply in place: on a CPU a copy also reads its target."""
    factors = itertools.cycle([2.0, 0.5])
    return limit(setup, "mul_", 2, lambda tensor: lambda: tensor.mul_(next(factors)))


def read_limit(setup: Setup) -> Case:
    """Sum over memory: nothing but reads."""
    return limit(setup, "sum", 1, lambda source: source.sum)
