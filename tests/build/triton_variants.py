"""List the Triton kernels as they are launched, for tests/build/triton_check.py."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel, the types of its arguments, and its options.

    Attributes:
        name: shown in the table; unique.
        needed: instructions that must be in the machine code, as sass.Kernel.count takes them.
        archs: its architectures.
        programs: of a launch, for each multiprocessor. There must be registers for all of them.
        last_reads: whether the program with the last ticket reads memory that the others wrote.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    archs: tuple[int, ...] = (80, 89, 90, 100, 120)
    programs: int = 1
    last_reads: bool = False


READS, WRITES = "LDG.E.128", "STG.E.128"
ACCESSES = {
    "check_finite_kernel": (READS,),
    "grad_norm_kernel": (READS,),
    "update_scale_kernel": (),
}
"""The 16-byte accesses of kernels that do not both read and write lists."""


def launchers() -> Iterator[Any]:
    """Yield the launchers of the ops on lists and of the optimizers."""
    import amp_ext.triton_kernels as package
    from amp_ext.triton_kernels.launch import Launcher

    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        values = vars(importlib.import_module(module.name)).values()
        yield from (value for value in values if isinstance(value, Launcher))


def list_variants() -> Iterator[Variant]:
    """Yield the kernels of lists and optim, with either value of each constexpr parameter."""
    for launcher in launchers():
        params = launcher.kernel.params
        types = {p.name: p.annotation_type for p in params if not p.is_constexpr}
        flags = [p.name for p in params if p.is_constexpr]
        for values in itertools.product((False, True), repeat=len(flags)):
            constexprs = dict(zip(flags, values, strict=True))
            name = launcher.kernel.__name__
            yield Variant(
                " ".join([name, *(f"{n}={v}" for n, v in constexprs.items())]),
                launcher.kernel,
                types | dict.fromkeys(flags, "constexpr"),
                constexprs,
                launcher.options,
                ACCESSES.get(name, (READS, WRITES)),
                programs=getattr(launcher, "programs", 1),
                last_reads="ticket" in types,
            )


def variants() -> list[Variant]:
    """Return all variants."""
    from gemm_triton_variants import gemm_variants

    return [*list_variants(), *gemm_variants()]
