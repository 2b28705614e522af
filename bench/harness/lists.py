"""Lists of gradients, as the multi-tensor ops are timed on them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from amp_ext import testing
from harness import providers
from harness.providers import Line
from harness.registry import (
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
    faults,
)

KI, MI = 1 << 10, 1 << 20
L2_MULTIPLE = 3
MAX_COPIES = 1000
MAX_COMPILED = 200  # tensors: torch.compile takes a second for every few
ALIGNMENT = 512  # bytes, at a multiple of which torch's CUDA allocator starts every tensor
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
        leaves = testing.parameters(grads)
        gradients = cls([leaf.grad for leaf in leaves])
        gradients.leaves = leaves
        return gradients

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
    shapes: Sequence[testing.Shape]
    dtypes: Sequence[torch.dtype]
    counted: bool = True

    @property
    def dtype(self) -> torch.dtype | None:
        """Of all tensors; None where they are of several."""
        return self.dtypes[0] if len(self.dtypes) == 1 else None

    def gradients(self, device: torch.device) -> Gradients:
        """Of parameters, with the same values every time."""
        return Gradients.of_parameters(testing.gradients(self.shapes, self.dtypes, device))

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


def gpt2_shapes(quick: bool) -> tuple[str, list[testing.Shape]]:
    """The parameters of GPT-2 small under their name; scaled down when `quick`."""
    if quick:
        shapes = testing.gpt2_small_shapes(width=24, vocabulary=1571, positions=32)
        return "GPT-2 small at 1/32 width", shapes
    return "GPT-2 small, 148 tensors", testing.gpt2_small_shapes()


# ---- providers that take the same gradients ----------------------------------------------------


def build(
    case: GradientList,
    lines: Mapping[str, Line],
    verify: Callable[[Line, Gradients], None],
    setup: Setup,
    factors: Sequence[float] = (1.0,),
    passes: int = 1,
) -> Trial:
    """All providers take the same gradients, each with a flag of its own.

    Args:
        case: whose gradients.
        lines: `launch` takes Gradients, a flag [1] to be raised by what is not finite, and a
            factor [].
        verify: raises CheckError where a line's result for copies of gradients is wrong.
        setup: as given to the op's cases.
        factors: taken in turn, each for as many launches as there are sets of gradients.
        passes: how many times a launch has to move every byte of the gradients.
    """
    device = setup.device
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

    def verify_all(names: Collection[str]) -> dict[str, str]:
        raised = {name for name in names if flags[name].item() != 0}
        if raised and not all(each.are_finite() for each in sets):
            raised = set()  # rightly: one of them has made infinities of what all share
        fresh = grads if grads.are_finite() else case.gradients(device)

        def verify_line(name: str) -> None:
            check(name not in raised, "found_inf was raised for finite gradients")
            with lines[name].around():
                verify(lines[name], fresh)

        return faults({name: partial(verify_line, name) for name in names})

    return Trial(
        tuple(timed(name, line) for name, line in lines.items()),
        verify_all,
        Work(bytes=passes * grads.bytes),
        alive=sets,
    )


def compiled_line(
    function: Callable[[list[Tensor], Tensor, Tensor], object], case: GradientList, setup: Setup
) -> Line | None:
    """A line of `build`'s by torch.compile; None where it does not take part, or fails.

    Args:
        function: takes gradients, a flag and a factor [].
        case: whose gradients.
        setup: as given to the op's cases.
    """
    if not case.compiles(setup):
        return None

    def run(program: Callable) -> None:
        flag = torch.zeros(1, device=setup.device)
        program(case.gradients(setup.device).flat, flag, torch.ones((), device=setup.device))

    program = providers.compiled(function, run)
    if program is None:
        return None
    return Line(lambda grads, flag, factor: program(grads.flat, flag, factor))


def new_flag(device: torch.device) -> Tensor:
    """A found_inf [1], not raised."""
    return torch.zeros(1, device=device)


def different(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """How many tensors differ from their partner in a bit, where not both have a NaN."""
    if not tensors[0].is_cuda:
        return sum(differ(*pair) for pair in zip(tensors, others, strict=True))
    # All at once: a GPU would be waited for at each of thousands.
    joined = [torch.cat([t.reshape(-1) for t in each]) for each in (tensors, others)]
    if not differ(*joined):
        return 0
    parts = zip(*(each.split([t.numel() for t in tensors]) for each in joined), strict=True)
    return sum(differ(*pair) for pair in parts)


def differ(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two dense tensors of one dtype differ in a bit, where not both have a NaN."""
    if bits(mine).equal(bits(theirs)):
        return False
    both = mine.isnan() & theirs.isnan()
    return bool(((bits(mine) != bits(theirs)) & ~both).any())


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


# ---- copies that leave no input in a GPU's L2 cache --------------------------------------------


def copies(size: int, device: torch.device) -> int:
    """How many sets of inputs of `size` bytes together leave none of them in a GPU's L2 cache.

    On a CPU one: gradients and activations are still in its caches when they are used.
    """
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + min(MAX_COPIES, L2_MULTIPLE * l2_bytes // max(size, 1))


def rotated(first: T, size: int, copy: Callable[[T], T], device: torch.device) -> list[T]:
    """`first` and as many copies as it takes; used one after the other, each is found cold."""
    return [first, *(copy(first) for _ in range(copies(size, device) - 1))]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one buffer for each dtype, aligned as if they were allocated one by one: a GPU's
    many sets of thousands of tensors would take seconds.

    Args:
        tensors: dense, all on one device; at least one.
    """
    places = list(offsets(tensors))
    ends = {tensor.dtype: offset + tensor.numel() for tensor, offset in places}
    device = tensors[0].device
    buffers = {dtype: torch.empty(end, dtype=dtype, device=device) for dtype, end in ends.items()}
    copied = [
        buffers[tensor.dtype].as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in places
    ]
    torch._foreach_copy_(copied, list(tensors))
    return copied


def offsets(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Each tensor, and its offset in elements in the buffer of its dtype."""
    taken: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        yield tensor, taken[tensor.dtype]
        unit = ALIGNMENT // tensor.itemsize
        taken[tensor.dtype] += -(-tensor.numel() // unit) * unit


# ---- limits ------------------------------------------------------------------------------------


def binary(size: int) -> str:
    """A multiple of 1024 in words: 65536 is "64 Ki"."""
    return f"{size // MI} Mi" if size % MI == 0 else f"{size // KI} Ki"


def limit_size(setup: Setup) -> int:
    """Elements of the one tensor that a limit is measured on."""
    return MI if setup.quick else 64 * MI


def copy_limit(setup: Setup) -> Case:
    """A copy of memory: as many bytes read as written."""
    size = limit_size(setup)

    def build_copy() -> Trial:
        source = testing.gradient(size, device=setup.device)
        target = torch.empty_like(source)
        return Trial(
            (Provider("copy", lambda: target.copy_(source)),), work=Work(bytes=2 * source.nbytes)
        )

    return Case(f"copy {binary(size)} fp32", build_copy, dtype=FP32, limit=True)


def in_place_limit(setup: Setup) -> Case:
    """As many bytes read as written, in place: on a GPU no faster than a copy. On a CPU it is,
    where caches read what a copy is to overwrite."""
    if setup.on_gpu:
        return copy_limit(setup)
    size = limit_size(setup)

    def build_products() -> Trial:
        tensor = testing.gradient(size, device=setup.device)
        factors = itertools.cycle([2.0, 0.5])
        return Trial(
            (Provider("mul_", lambda: tensor.mul_(next(factors))),),
            work=Work(bytes=2 * tensor.nbytes),
        )

    return Case(f"mul_ {binary(size)} fp32", build_products, dtype=FP32, limit=True)


def read_limit(setup: Setup) -> Case:
    """A sum over memory: nothing but reads."""
    size = limit_size(setup)

    def build_sum() -> Trial:
        source = testing.gradient(size, device=setup.device)
        return Trial((Provider("sum", source.sum),), work=Work(bytes=source.nbytes))

    return Case(f"sum {binary(size)} fp32", build_sum, dtype=FP32, limit=True)
