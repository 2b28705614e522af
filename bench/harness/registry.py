"""Define the parts of a benchmark: an op is a module of ops/ that defines `OP`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

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


def faults(checks: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Return the error of each check that raises, by the provider's name."""
    found = {}
    for name, run in checks.items():
        try:
            run()
        except Exception as error:  # one provider's failure must leave the others their results
            found[name] = described(error)
    return found


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Setup:
    """Hold the choices of the command line.

    Args:
        device: where everything lies.
        quick: whether inputs are a few MiB at most.
        dtype: the only dtype wanted; None for the op's usual ones.
        compiled: whether torch.compile takes part.
        sizes: the only list of gradients wanted, as pairs of a count and a size.
        product: the only product wanted, as m, n, k and layout.
    """

    device: torch.device
    quick: bool = False
    dtype: torch.dtype | None = None
    compiled: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    product: tuple[int, int, int, str] | None = None

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
    """Hold one implementation of an op.

    Args:
        name: a backend of amp_ext (ledger.OURS), "torch" (the baseline), or another.
        launch: runs the op once, timed.
        prepare: runs untimed before each sample, which is then a single launch.
        excluded_ns: returns nanoseconds of the last launch that do not belong to the op.
        around: a context for each sample, entered and left untimed.
    """

    name: str
    launch: Callable[[], object]
    prepare: Callable[[], object] | None = None
    excluded_ns: Callable[[], int] | None = None
    around: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Work:
    """Count the work of one launch, the same for all providers.

    Args:
        bytes: that have to be read plus those that have to be written.
        flops: floating-point operations.
        parameters: of the optimizer that a step updates.
        calls: in one launch.
    """

    bytes: int = 0
    flops: int = 0
    parameters: int = 0
    calls: int = 1


@dataclass(frozen=True)
class Trial:
    """Hold a case with its inputs in memory.

    Args:
        providers: in the order of the table's lines.
        verify: takes the names of the timed providers; returns the errors of wrong results.
        work: of one launch.
        alive: other objects that live as long as the inputs, such as the parameters of gradients.
    """

    providers: tuple[Provider, ...]
    verify: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    work: Work = Work()
    alive: object = None


@dataclass(frozen=True)
class Case:
    """Name a case; `build` makes its inputs.

    Args:
        counted: whether the case enters the geometric mean.
        baseline: the provider that ratios are to.
        dtype: of the operands, where they have one dtype.
        limit: whether the case is a table's first row, a bound for all implementations.
    """

    name: str
    build: Callable[[], Trial]
    counted: bool = True
    baseline: str = BASELINE
    dtype: torch.dtype | None = None
    limit: bool = False


@dataclass(frozen=True)
class Op:
    """Describe a table of the benchmark program.

    Args:
        name: as on the command line.
        notes: on layout, sizes and subtracted time, printed above the table.
        rate: "GB/s", "GFLOP/s", "us/param", "us/call" or "ms/step", a column of the table.
        host: whether the host's clock times the op on a GPU too.
        limit: makes the first row.
        cases: makes all other rows.
        axis: the field of Setup that replaces the cases, "sizes" or "product".
    """

    name: str
    notes: str
    rate: str
    host: bool
    limit: Callable[[Setup], Case]
    cases: Callable[[Setup], list[Case]]
    axis: str = ""


def load(name: str) -> Op:
    """Import the op's module."""
    return importlib.import_module(f"ops.{name}").OP
