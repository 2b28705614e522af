"""Lists of gradients, as the multi-tensor ops are timed on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from amp_ext import testing
from registry import BF16, FP16, FP32, NAMES, Case, Provider, Setup, Trial, Work

KI, MI = 1 << 10, 1 << 20
L2_MULTIPLE = 3
MAX_COPIES = 1000
MAX_COMPILED = 200  # tensors: torch.compile takes a second for every few
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
        made = cls([leaf.grad for leaf in leaves])
        made.leaves = leaves
        return made

    def clone(self) -> Gradients:
        return Gradients([grad.clone() for grad in self.flat])

    def spoil_last(self, value: float) -> None:
        self.flat[-1].view(-1)[-1] = value


@dataclass(frozen=True)
class GradientList:
    """A case's tensors; several dtypes are dealt out in turn."""

    name: str
    shapes: Sequence[testing.Shape]
    dtypes: Sequence[torch.dtype]
    counted: bool = True

    def make(self, device: torch.device) -> Gradients:
        return Gradients.of_parameters(testing.gradients(self.shapes, self.dtypes, device))

    def compiles(self, setup: Setup) -> bool:
        """Whether torch.compile is to take part."""
        return setup.compiled and self.counted and len(self.shapes) <= MAX_COMPILED


def gradient_lists(setup: Setup, mixed: Sequence[torch.dtype]) -> list[GradientList]:
    """Many, few and mixed tensors; `mixed` are the dtypes of the list that has several."""
    large, largest = (64 * KI, MI) if setup.quick else (4 * MI, 64 * MI)
    gpt2_name, gpt2 = gpt2_shapes(setup.quick)
    made = []
    for dtype in setup.dtypes(FP32, also=(FP16, BF16)):
        name = NAMES[dtype]
        made += [
            GradientList(f"4000 x 100 {name}", 4000 * [100], [dtype]),
            GradientList(f"16 x {binary(large)} {name}", 16 * [large], [dtype]),
            GradientList(f"1 x {binary(largest)} {name}", [largest], [dtype]),
            GradientList(f"{gpt2_name}, {name}", gpt2, [dtype]),
        ]
    if setup.dtype is None:
        made.append(
            GradientList(f"300 x 10000 {'+'.join(map(NAMES.get, mixed))}", 300 * [10000], mixed)
        )
    small = setup.dtype or FP32
    made.append(GradientList(f"2 x 10 {NAMES[small]}", 2 * [10], [small], counted=False))
    return made


def gpt2_shapes(quick: bool) -> tuple[str, list[testing.Shape]]:
    """The parameters of GPT-2 small under their name; scaled down when `quick`."""
    if quick:
        shapes = testing.gpt2_small_shapes(width=24, vocabulary=1571, positions=32)
        return "GPT-2 small at 1/32 width", shapes
    return "GPT-2 small, 148 tensors", testing.gpt2_small_shapes()


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


def binary(size: int) -> str:
    """A multiple of 1024 in words: 65536 is "64 Ki"."""
    return f"{size // MI} Mi" if size % MI == 0 else f"{size // KI} Ki"


def copy_limit(setup: Setup) -> Case:
    """A copy of memory: as many bytes read as written."""
    size = MI if setup.quick else 64 * MI

    def build() -> Trial:
        source = testing.gradient(size, device=setup.device)
        target = torch.empty_like(source)
        return Trial(
            (Provider("copy", lambda: target.copy_(source)),), work=Work(bytes=2 * source.nbytes)
        )

    return Case(f"copy {binary(size)} fp32", build, limit=True)


def read_limit(setup: Setup) -> Case:
    """A sum over memory: nothing but reads."""
    size = MI if setup.quick else 64 * MI

    def build() -> Trial:
        source = testing.gradient(size, device=setup.device)
        return Trial((Provider("sum", source.sum),), work=Work(bytes=source.nbytes))

    return Case(f"sum {binary(size)} fp32", build, limit=True)
