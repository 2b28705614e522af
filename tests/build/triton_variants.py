"""The Triton kernels as their launchers call them: what tests/build/triton_check.py compiles."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Describe a kernel, the types of its arguments, and its compile options.

    Attributes:
        name: shown in the table; unique.
        needed: instructions that must be in the machine code, as sass.Kernel.count takes them.
        attributes: what is known of arguments, by index, as triton.compiler.ASTSource takes it.
        archs: the architectures it is for.
        programs: of a launch, for each multiprocessor; there must be registers for all of them.
        last_reads: the program that draws the last ticket reads what the others have written.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    attributes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    archs: tuple[int, ...] = (80, 89, 90, 100, 120)
    programs: int = 1
    last_reads: bool = False


def list_variants(part: str) -> Iterator[Variant]:
    """Return the kernels of "lists" or "optim", with either value of each constexpr parameter.

    All else is in a kernel's module: the types of arguments in its annotations, 16-byte accesses
    where it imports those of rows.
    """
    package = importlib.import_module(f"amp_ext.triton_kernels.{part}")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    usual = vars(importlib.import_module("amp_ext.triton_kernels.lists.foreach"))
    for module in modules.values():
        known = usual | vars(module)
        accesses = {"load_rows": "LDG.E.128", "store_rows": "STG.E.128"}
        needed = tuple(accesses[name] for name in accesses if hasattr(module, name))
        for kernel in kernels_of(module).values():
            types = {p.name: p.annotation_type for p in kernel.params if not p.is_constexpr}
            flags = [p.name for p in kernel.params if p.is_constexpr]
            for values in itertools.product((False, True), repeat=len(flags)):
                constexprs = dict(zip(flags, values, strict=True))
                yield Variant(
                    " ".join([kernel.__name__, *(f"{n}={v}" for n, v in constexprs.items())]),
                    kernel,
                    types | dict.fromkeys(flags, "constexpr"),
                    constexprs,
                    known["OPTIONS"],
                    needed,
                    programs=known["PROGRAMS_PER_MULTIPROCESSOR"],
                    last_reads="ticket" in types,
                )


def kernels_of(module: Any) -> dict[str, Any]:
    """Return a module's kernels by name: compiled functions called *_kernel."""
    from triton.runtime.jit import JITFunction

    return {
        name: value
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    }


def variants() -> list[Variant]:
    """Return all variants."""
    from gemm_triton_variants import gemm_variants

    return [*list_variants("lists"), *list_variants("optim"), *gemm_variants()]
