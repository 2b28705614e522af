"""Lists of gradients, as the multi-tensor ops are timed on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from harness import providers
from harness.providers import Line
from harness.registry import (
    BASELINE,
    BF16,
    FP16,
    FP32,
    NAMES,
    Case,
    Provider,
    Setup,
    Trial,
    Work,
    check,
)
from workloads.gradients import Shape, gpt2_shapes, gradient, gradients, parameters

KI, MI = 1 << 10, 1 << 20
L2_MULTIPLE = 3
MAX_COPIES = 1000
MAX_COMPILED = 200  # tensors: torch.compile takes a second for every few
INTEGERS = {2: torch.int16, 4: torch.int32}  # by size in bytes
T = TypeVar("T")


class Gradients:
    """Gradients, whole and by dtype: torch's ops take one dtype at a time."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.flat = grads
        groups: dict[torch.dtype, list[Tensor]] = {}
        for grad in self.flat:
            groups.setdefault(grad.dtype, []).append(grad)
        self.groups = list(groups.values())
        self.bytes = sum(grad.nbytes for grad in grads)
        self.leaves: list[torch.nn.Parameter] = []

    @classmethod
    def of_parameters(cls, grads: list[Tensor]) -> Gradients:
        """The .grad of parameters."""
        leaves = parameters(grads)
        made = cls([leaf.grad for leaf in leaves])
        made.leaves = leaves
        return made

    def clone(self) -> Gradients:
        return Gradients(clones(self.flat))

    def spoil_last(self, value: float) -> None:
        self.flat[-1].view(-1)[-1] = value

    def are_finite(self) -> bool:
        return bool(torch.stack([grad.isfinite().all() for grad in self.flat]).all())


@dataclass(frozen=True)
class GradientList:
    """A case's tensors; several dtypes are dealt out in turn."""

    name: str
    shapes: Sequence[Shape]
    dtypes: Sequence[torch.dtype]
    counted: bool = True

    @property
    def dtype(self) -> torch.dtype | None:
        """Of all tensors; None where they are of several."""
        return self.dtypes[0] if len(self.dtypes) == 1 else None

    def gradients(self, device: torch.device) -> Gradients:
        """Of parameters, with the same values every time."""
        return Gradients.of_parameters(gradients(self.shapes, self.dtypes, device))

    def compiles(self, setup: Setup) -> bool:
        """Whether torch.compile is to take part."""
        return setup.compiled and self.counted and len(self.shapes) <= MAX_COMPILED


def gradient_lists(setup: Setup, mixed: Sequence[torch.dtype]) -> list[GradientList]:
    """Many, few and mixed tensors; `mixed` are the dtypes of the list that has several."""
    large, largest = (64 * KI, MI) if setup.quick else (4 * MI, 64 * MI)
    gpt2_name, gpt2 = gpt2_shapes(setup.quick)
    lists = []
    for dtype in setup.dtypes(FP32, also=(FP16, BF16)):
        name = NAMES[dtype]
        lists += [
            GradientList(f"4000 x 100 {name}", 4000 * [100], [dtype]),
            GradientList(f"16 x {binary(large)} {name}", 16 * [large], [dtype]),
            GradientList(f"1 x {binary(largest)} {name}", [largest], [dtype]),
            GradientList(f"{gpt2_name}, {name}", gpt2, [dtype]),
        ]
    if setup.dtype is None:
        lists.append(
            GradientList(f"300 x 10000 {'+'.join(map(NAMES.get, mixed))}", 300 * [10000], mixed)
        )
    small = setup.dtype or FP32
    lists.append(GradientList(f"2 x 10 {NAMES[small]}", 2 * [10], [small], counted=False))
    return lists


def cases(
    setup: Setup,
    mixed: Sequence[torch.dtype],
    build: Callable[[GradientList, Setup], Trial],
    baseline: str = BASELINE,
) -> list[Case]:
    """An op's cases, a list of gradients each."""
    return [
        Case(each.name, partial(build, each, setup), each.counted, baseline, each.dtype)
        for each in gradient_lists(setup, mixed)
    ]


# ---- providers that take the same gradients ----------------------------------------------------


def build(
    case: GradientList,
    setup: Setup,
    lines: dict[str, Line],
    verify: Callable[[Line, Gradients], None],
    composed: Callable[[list[Tensor], Tensor, Tensor], object] | None,
    factors: Sequence[float] = (1.0,),
    passes: int = 1,
) -> Trial:
    """All providers take the same gradients, each with a flag of its own.

    Args:
        case: whose gradients.
        setup: as given to the op's cases.
        lines: `launch` takes Gradients, a flag [1] to be raised by what is not finite, and a
            factor [].
        verify: raises CheckError where a line's result for copies of gradients is wrong.
        composed: the op of torch's ordinary ones, for torch.compile where that takes part; takes
            tensors, a flag and a factor.
        factors: taken in turn, each for as many launches as there are sets of gradients.
        passes: how many times a launch has to move every byte of the gradients.
    """
    device = setup.device
    if composed and case.compiles(setup) and (line := compiled_line(composed, case, device)):
        lines[providers.COMPILE] = line
    grads = case.gradients(device)
    sets = rotated(grads, grads.bytes, Gradients.clone, device)
    tensors = [torch.tensor(value, device=device) for value in factors]
    turns = itertools.cycle([(each, factor) for factor in tensors for each in sets])
    flags = {name: new_flag(device) for name in lines}

    def timed(name: str, line: Line) -> Provider:
        flag = flags[name]

        def launch() -> None:
            grads, factor = next(turns)
            line.launch(grads, flag, factor)

        return Provider(name, launch, around=line.around)

    @cache
    def finite_gradients() -> Gradients:
        return grads if grads.are_finite() else case.gradients(device)

    def verify_line(name: str, line: Line) -> None:
        if flags[name].item() != 0:  # rightly where another has made infinities of what all share
            spoilt = not all(each.are_finite() for each in sets)
            check(spoilt, "found_inf was raised for finite gradients")
        verify(line, finite_gradients())

    return providers.trial(lines, timed, verify_line, Work(bytes=passes * grads.bytes), alive=sets)


def compiled_line(
    function: Callable[[list[Tensor], Tensor, Tensor], object],
    case: GradientList,
    device: torch.device,
) -> Line | None:
    """A line of `build`'s by torch.compile; None where that fails."""

    def run(program: Callable) -> None:
        program(case.gradients(device).flat, new_flag(device), torch.ones((), device=device))

    program = providers.compiled(function, run)
    return program and Line(lambda grads, flag, factor: program(grads.flat, flag, factor))


def new_flag(device: torch.device) -> Tensor:
    """A found_inf [1], not raised."""
    return torch.zeros(1, device=device)


def different(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """How many tensors differ from their partner in a bit, where not both have a NaN."""

    def differ(mine: Tensor, theirs: Tensor) -> Tensor:
        unequal = mine.view(INTEGERS[mine.itemsize]) != theirs.view(INTEGERS[mine.itemsize])
        return (unequal & ~(mine.isnan() & theirs.isnan())).any()

    return int(torch.stack([differ(*pair) for pair in zip(tensors, others, strict=True)]).sum())


# ---- copies that leave no input in a GPU's L2 cache --------------------------------------------


def rotated(first: T, size: int, copy: Callable[[T], T], device: torch.device) -> list[T]:
    """Inputs to be used one after the other: `first`, and on a GPU as many copies as together leave
    none of them in its L2 cache.

    On a CPU `first` alone: gradients and activations are still in its caches when they are used.

    Args:
        first: inputs.
        size: of `first`, in bytes.
        copy: copies inputs.
        device: where they lie.
    """
    copies = 0
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = min(MAX_COPIES, L2_MULTIPLE * l2_bytes // max(size, 1))
    return [first, *(copy(first) for _ in range(copies))]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, by few launches: one for each of thousands of tensors and sets would take seconds."""
    copied = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copied, list(tensors))
    return copied


# ---- limits ------------------------------------------------------------------------------------


def binary(size: int) -> str:
    """A multiple of 1024 in words: 65536 is "64 Ki"."""
    return f"{size // MI} Mi" if size % MI == 0 else f"{size // KI} Ki"


def limit(setup: Setup, name: str, passes: int, op: Callable[[Tensor], Callable]) -> Case:
    """A case of one large FP32 tensor, which is moved so many times by what `op` makes for it."""
    size = MI if setup.quick else 64 * MI

    def build_limit() -> Trial:
        tensor = gradient(size, device=setup.device)
        return Trial((Provider(name, op(tensor)),), work=Work(bytes=passes * tensor.nbytes))

    return Case(f"{name} {binary(size)} fp32", build_limit, dtype=FP32, limit=True)


def copy_limit(setup: Setup) -> Case:
    """A copy of memory: as many bytes read as written."""
    return limit(setup, "copy", 2, lambda source: partial(torch.empty_like(source).copy_, source))


def in_place_limit(setup: Setup) -> Case:
    """As many bytes read as written, in place: on a GPU no faster than a copy. On a CPU it is,
    where caches read what a copy is to overwrite."""
    if setup.on_gpu:
        return copy_limit(setup)
    factors = itertools.cycle([2.0, 0.5])
    return limit(setup, "mul_", 2, lambda tensor: lambda: tensor.mul_(next(factors)))


def read_limit(setup: Setup) -> Case:
    """A sum over memory: nothing but reads."""
    return limit(setup, "sum", 1, lambda source: source.sum)
