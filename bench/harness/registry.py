"""Define the parts of a benchmark: an op is a module of ops/ that defines `OP`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OPS = tuple(sorted(path.stem for path in Path(__file__).parents[1].glob("ops/[!_]*.py")))
BASELINE = "torch"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckError(Exception):
    """Report a wrong result of a provider."""


def check(condition: bool, message: str) -> None:
    """Raise CheckError(message) unless `condition` holds."""
    if not condition:
        raise CheckError(message)


@contextmanager
def noted(errors: dict[str, str], name: str) -> Iterator[None]:
    """Note a provider's error, which leaves the others their results."""
    try:
        yield
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Setup:
    """Hold the choices of the command line."""

    device: torch.device
    quick: bool = False  # inputs of a few MiB at most
    dtype: torch.dtype | None = None  # the only dtype wanted; None for the op's usual ones
    sizes: tuple[tuple[int, int], ...] = ()  # the only list wanted: counts and sizes
    product: tuple[int, int, int, str] | None = None  # the only product: m, n, k and layout

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small(self) -> bool:
        """Return whether networks and their layers are scaled down."""
        return self.quick or not self.on_gpu

    def dtypes(self, *usual: torch.dtype, also: tuple[torch.dtype, ...] = ()) -> tuple:
        """Return `usual`, or the wanted dtype if `usual` or `also` has it."""
        if self.dtype is None:
            return usual
        return (self.dtype,) if self.dtype in (*usual, *also) else ()


@dataclass(frozen=True)
class Provider:
    """Hold one implementation of an op; its launch is timed."""

    name: str  # a backend of amp_ext (ledger.OURS), "torch" (the baseline), or another
    launch: Callable[..., Any]
    prepare: Callable[[], object] | None = None  # before each sample; a sample is then one launch
    excluded_ns: Callable[[], int] | None = None  # of the last launch: not the op's own time
    around: Callable[[], AbstractContextManager] = nullcontext  # of each sample, untimed


@dataclass(frozen=True)
class Work:
    """Count the work of one launch, the same for all providers."""

    bytes: int = 0  # to read and to write
    flops: int = 0
    parameters: int = 0  # of the optimizer that a step updates
    calls: int = 1


@dataclass(frozen=True)
class Trial:
    """Hold the providers of a case, whose inputs are in memory.

    Args:
        providers: in the order of the table's lines. A launch takes what `timed` and `verify` pass.
        verify: raises CheckError for a provider's wrong result, within the provider's context.
        work: of one timed launch.
        timed: returns a provider with a launch without arguments, within the provider's context.
        unchecked: names of the providers that the others are compared with.
    """

    providers: Sequence[Provider]
    verify: Callable[[Provider], object] = lambda provider: None
    work: Work = Work()
    timed: Callable[[Provider], Provider] = lambda provider: provider
    unchecked: Collection[str] = ()


@dataclass(frozen=True)
class Case:
    """Name a case; `build` makes its inputs."""

    name: str
    build: Callable[[], Trial]
    counted: bool = True  # in the geometric mean
    baseline: str = BASELINE  # the provider that ratios are to
    dtype: torch.dtype | None = None  # of the operands, where they have one dtype
    limit: bool = False  # the table's first row, a yardstick


def bound(
    name: str,
    make: Callable[[], Callable[[], object]],
    work: Work = Work(),
    dtype: torch.dtype | None = None,
    provider: str = BASELINE,
) -> Case:
    """Return a table's first row; `make` makes the inputs and returns a launch."""
    build = lambda: Trial([Provider(provider, make())], work=work)  # noqa: E731
    return Case(name, build, dtype=dtype, limit=True)


@dataclass(frozen=True)
class Op:
    """Describe a table of the benchmark program."""

    name: str  # as on the command line
    notes: str  # on layout, sizes and subtracted time, printed above the table
    rate: str  # a column: "GB/s", "GFLOP/s", "us/param", "us/call" or "ms/step"
    host: bool  # whether the host's clock times the op on a GPU too
    limit: Callable[[Setup], Case]  # the first row
    cases: Callable[[Setup], list[Case]]
    axis: str = ""  # the field of Setup that replaces the cases, "sizes" or "product"


def load(name: str) -> Op:
    """Import the op's module."""
    return importlib.import_module(f"ops.{name}").OP
