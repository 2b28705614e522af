"""The Triton kernels as their launchers call them: what tests/build/triton_check.py compiles."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel, the types of its arguments, and what it is compiled with.

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
    archs: tuple[int, ...] = (80, 90, 100)
    programs: int = 1
    last_reads: bool = False


def _module(name: str) -> Any:
    # The package's attributes of the same names are the ops.
    return importlib.import_module(f"amp_ext.triton_kernels.lists.{name}")


def _of_numbers(
    kernel: Any,
    options: dict[str, Any],
    needed: tuple[str, ...] = (),
    programs: int = 1,
    last_reads: bool = False,
    **constexprs: Any,
) -> Variant:
    """A kernel whose arguments are annotated with their types, as those of lists are."""
    types = {parameter.name: parameter.annotation_type for parameter in kernel.params}
    signature = {name: "constexpr" if name in constexprs else of for name, of in types.items()}
    name = " ".join([kernel.__name__, *(f"{name}={value}" for name, value in constexprs.items())])
    return Variant(
        name,
        kernel,
        signature,
        constexprs,
        options,
        needed,
        programs=programs,
        last_reads=last_reads,
    )


def list_variants() -> Iterator[Variant]:
    """The kernels of the ops on lists of tensors."""
    loads, stores = ("LDG.E.128",), ("LDG.E.128", "STG.E.128")
    foreach, cast, grad_norm, update = map(
        _module, ("foreach", "cast", "grad_norm", "update_scale")
    )
    options, programs = foreach.OPTIONS, foreach.PROGRAMS_PER_MULTIPROCESSOR
    yield _of_numbers(_module("unscale").unscale_kernel, options, stores, programs)
    yield _of_numbers(_module("check_finite").check_finite_kernel, options, loads, programs)
    yield _of_numbers(cast.cast_kernel, options, stores, cast.PROGRAMS_PER_MULTIPROCESSOR)
    for per_tensor in (False, True):
        yield _of_numbers(
            grad_norm.grad_norm_kernel,
            grad_norm.OPTIONS,
            loads,
            grad_norm.PROGRAMS_PER_MULTIPROCESSOR,
            last_reads=True,
            PER_TENSOR=per_tensor,
        )
    yield _of_numbers(update.update_scale_kernel, update.OPTIONS)


def variants() -> list[Variant]:
    """All of them."""
    from gemm_triton_variants import gemm_variants

    return [*list_variants(), *gemm_variants()]
