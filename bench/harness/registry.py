"""What a benchmark consists of. An op is a module of ops/ of its name, which defines `OP`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

OPS = tuple(sorted(path.stem for path in Path(__file__).parents[1].glob("ops/[!_]*.py")))
"""As on the command line and in ledgers."""
BASELINE = "torch"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckError(Exception):
    """A provider's result is not what it should be."""


def check(condition: bool, message: str) -> None:
    """Raise CheckError(message) unless `condition` holds."""
    if not condition:
        raise CheckError(message)


def faults(checks: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """What is wrong with providers, by name: what each one's check raised, of whatever type."""
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
    """What the command line asks of an op's cases.

    Args:
        device: where everything lies.
        quick: inputs of a few MiB at most.
        dtype: the only dtype wanted; the op's usual ones when None.
        compiled: whether torch.compile takes part.
    """

    device: torch.device
    quick: bool = False
    dtype: torch.dtype | None = None
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small(self) -> bool:
        """Whether networks and their layers have to be scaled down."""
        return self.quick or not self.on_gpu

    def dtypes(
        self, *usual: torch.dtype, also: tuple[torch.dtype, ...] = ()
    ) -> tuple[torch.dtype, ...]:
        """Which to time: `usual`, or the one asked for if it is among `usual` and `also`."""
        if self.dtype is None:
            return usual
        return (self.dtype,) if self.dtype in (*usual, *also) else ()


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Args:
        name: a backend of amp_ext (ledger.OURS), "torch" (the baseline), or another.
        launch: runs the op once; what it does is timed.
        prepare: runs untimed before each sample; a sample is then a single launch.
        excluded_ns: nanoseconds of the last launch that are not the op's own, to be subtracted
            from the host's time.
        around: a context for each sample, entered and left untimed.
    """

    name: str
    launch: Callable[[], object]
    prepare: Callable[[], object] | None = None
    excluded_ns: Callable[[], int] | None = None
    around: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Work:
    """What one launch has to do, whichever provider does it.

    Args:
        bytes: that have to be read plus those that have to be written.
        flops: floating-point operations.
        parameters: of the optimizer that a step updates.
        calls: that it consists of.
    """

    bytes: int = 0
    flops: int = 0
    parameters: int = 0
    calls: int = 1


@dataclass(frozen=True)
class Trial:
    """A case with its inputs in memory.

    Args:
        providers: in the order of the table's lines.
        verify: called after the timing with the names of the providers that were timed; returns
            what is wrong with their results, by name (see `faults`).
        work: of one launch.
        alive: what else has to live as long as the inputs, such as the parameters of gradients: a
            tensor that Python alone holds costs any op more to take in.
    """

    providers: tuple[Provider, ...]
    verify: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    work: Work = Work()
    alive: object = None


@dataclass(frozen=True)
class Case:
    """A named case; `build` makes its inputs.

    Args:
        counted: whether it enters the geometric mean.
        baseline: the provider that ratios are to.
        dtype: of its operands, where they are of one.
        limit: whether it is a table's first row: what no implementation is expected to beat.
    """

    name: str
    build: Callable[[], Trial]
    counted: bool = True
    baseline: str = BASELINE
    dtype: torch.dtype | None = None
    limit: bool = False


@dataclass(frozen=True)
class Op:
    """A table of the benchmark program.

    Args:
        name: as on the command line.
        notes: lines on layout, sizes and what is subtracted, printed above the table.
        rate: "GB/s", "GFLOP/s", "us/param", "us/call" or "ms/step", the column beside the times.
        host: time the host, also where the op runs on a GPU.
        limit: the first row: what no implementation is expected to beat.
        cases: all cases.
    """

    name: str
    notes: tuple[str, ...]
    rate: str
    host: bool
    limit: Callable[[Setup], Case]
    cases: Callable[[Setup], list[Case]]


def load(name: str) -> Op:
    """Import the op's module."""
    return importlib.import_module(f"ops.{name}").OP
