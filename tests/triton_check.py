"""Check the Triton kernels without a GPU: compile each for every architecture and read the result.

    python tests/triton_check.py

Run by `make cuda-check`. It prints a table of the kernels and fails where a kernel needs more
shared memory than a block may have, uses local memory, or has none of the instructions that it was
written for, and where triton_kernels has a kernel that tests/triton_variants.py lacks.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuda_check import cuobjdump
from sass import Kernel, Kernels, read_sass, read_usage
from triton_variants import Variant, variants

SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Architectures, and the bytes of shared memory that a block may have."""


def compiled(variant: Variant, arch: int) -> Kernel:
    """What Triton and ptxas make of a variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, variant.constexprs, variant.attributes)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    kernels: Kernels = {}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(result.asm["cubin"])
        read_sass(cuobjdump(cubin), kernels)
        read_usage(cuobjdump(cubin, "-res-usage"), kernels)
    (kernel,) = kernels.values()
    kernel.shared = result.metadata.shared  # the launch asks for it
    return kernel


def local_accesses(kernel: Kernel) -> int:
    """Loads and stores of local memory: registers that are spilled, arrays that are indexed."""
    return kernel.count("LDL") + kernel.count("STL")


def faults(kernel: Kernel, needed: Iterable[str], shared_limit: int) -> list[str]:
    """What is wrong with one kernel."""
    found = []
    if not kernel.instructions:
        found.append("it has no machine code")
    if kernel.registers == 0:
        found.append("cuobjdump said nothing about its registers")
    if kernel.shared > shared_limit:
        found.append(f"{kernel.shared} bytes of shared memory, a block may have {shared_limit}")
    if kernel.stack:
        found.append(f"{kernel.stack} bytes of stack")
    if local := local_accesses(kernel):
        found.append(f"{local} loads and stores of local memory")
    return found + [f"no {wanted}" for wanted in needed if not kernel.count(wanted)]


def library_kernels() -> dict[str, Any]:
    """The kernels of triton_kernels by name: what is compiled and called *_kernel."""
    import amp_ext.triton_kernels as package
    from triton.runtime.jit import JITFunction

    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    }


def missing(kernels: dict[str, Any], checked: Iterable[Variant]) -> list[str]:
    """Kernels of which no variant is checked."""
    known = [variant.kernel for variant in checked]
    return [
        f"no variant of {name} is checked"
        for name, kernel in kernels.items()
        if kernel not in known
    ]


def main() -> int:
    import triton

    if triton.knobs.runtime.interpret:
        print("triton-check: unset TRITON_INTERPRET, interpreted kernels are not compiled")
        return 1
    wanted = variants()
    problems = missing(library_kernels(), wanted)
    heads = ("regs", "smem", "stack", "spills", "size")
    print(f"{'Triton kernel':<48}{'arch':<8}" + "".join(f"{head:>10}" for head in heads))
    for variant in wanted:
        for arch in variant.archs:
            limit = SHARED_LIMITS[arch]
            kernel = compiled(variant, arch)
            label = f"{variant.name} for sm_{arch}"
            problems += [f"{label}: {fault}" for fault in faults(kernel, variant.needed, limit)]
            columns = (kernel.registers, kernel.shared, kernel.stack, local_accesses(kernel))
            columns += (kernel.instructions.total(),)
            row = "".join(f"{column:>10}" for column in columns)
            print(f"{variant.name:<48}sm_{arch:<5}{row}")
    print("shared memory and stack in bytes, spills and size in instructions")
    for problem in problems:
        print(f"triton-check: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
