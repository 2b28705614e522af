"""Compile the Triton kernels for every architecture, without a GPU, and check the result.

    python tests/build/triton_check.py

`make cuda-check` runs it. It fails where a kernel needs more shared memory than a block has or more
registers than its launch leaves. It fails where a kernel uses local memory, lacks the instructions
it was written for, or reads other programs' results without waiting. It fails where a number, such
as an address, would compile a kernel of lists anew.
"""

import multiprocessing
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

from sass import REGISTERS, Kernel, common_faults, read_kernels
from triton_variants import Variant, list_variants, variants

SHARED_LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""The bytes of shared memory that a block may have, by architecture."""
wanted = cache(variants)


def compiled(index: int, arch: int) -> tuple[Kernel, str, int]:
    """Return the machine code of a variant, its PTX, and the bytes of shared memory of its launch.

    The variant is given by its index: a kernel cannot be sent to another process.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = wanted()[index]
    source = ASTSource(variant.kernel, variant.signature, variant.constexprs, {})
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(result.asm["cubin"])
        (kernel,) = read_kernels(cubin).values()
    return kernel, result.asm["ptx"], result.metadata.shared


KINDS = {
    "S": r"st\.global\b",
    "B": r"bar\.sync\b",
    "T": r"atom\.global\.gpu\.acq_rel\.",
    "A": r"(?:atom|red)\.",
    "R": r"ld\.global\.cg\b",
    "J": r"bra\b|\$(?!L__tmp)\w+:|ret\b",
}
"""Stores, barriers, tickets, other atomic operations, reads past the first cache, and branches."""


def is_ordered(ptx: str) -> bool:
    """Return whether a kernel's last program sees all other programs' results.

    Every thread stores, and all meet at a barrier. One thread draws a ticket: the ticket releases
    these stores and acquires other programs' stores. All meet again and read past the first cache.
    No branch lies between the ticket and the barriers beside it.
    """
    line = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS.items())
    found = re.finditer(rf"^\s*(?:@!?%\w+\s+)?(?:{line})", ptx, re.MULTILINE)
    order = "".join(match.lastgroup for match in found)
    return re.fullmatch("[SBJ]*S[SBJ]*BTB[SBJR]*R[SBJR]*", order) is not None


def keys(variant: Variant) -> set[str]:
    """Return the keys that Triton has for a kernel of lists with any addresses and counts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(variant.kernel.signature, variant.kernel.params, backend)
    found = set()
    for number in (0, 1, 2, 16, 2**31, 2**40, 2**63 - 16, -16, 0.0, 1.0):
        numbers = [
            number if parameter.annotation_type == "fp32" else int(number)
            for parameter in variant.kernel.params
        ]
        _, *key = bind(*numbers, **variant.options, debug=False)
        found.add(str(key))
    return found


def main() -> int:
    import triton

    if triton.knobs.runtime.interpret:
        print("triton-check: unset TRITON_INTERPRET, interpreted kernels are not compiled")
        return 1
    problems = [f"{v.name}: a number compiles it anew" for v in list_variants() if len(keys(v)) > 1]
    jobs = [(index, arch) for index, variant in enumerate(wanted()) for arch in variant.archs]
    with multiprocessing.get_context("fork").Pool() as pool:  # forks share the kernels already read
        results = pool.starmap(compiled, jobs, chunksize=1)
    for (index, arch), (kernel, ptx, shared) in zip(jobs, results, strict=True):
        variant, limit = wanted()[index], SHARED_LIMITS[arch]
        found = common_faults(kernel, variant.needed)
        if shared > limit:
            found.append(f"{shared} bytes of shared memory, a block may have {limit}")
        threads = 32 * variant.options.get("num_warps", 4) * variant.programs
        if kernel.warp_registers * threads > REGISTERS:
            found.append(f"{kernel.registers} registers for each of {threads} threads of a launch")
        if variant.last_reads and not is_ordered(ptx):
            found.append("the last program may read too early")
        problems += [f"{variant.name} for sm_{arch}: {fault}" for fault in found]
    print(f"{len(jobs)} kernels of Triton")
    for problem in problems:
        print(f"triton-check: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
