"""Check the CUDA kernels of an installed build without a GPU: what ptxas said and the machine code.

    python tests/cuda_check.py

Run by `make cuda-check`, with the Python whose amp_ext was built from this tree. It prints a table
of the kernels and fails on a register spill, on a remark of ptxas about serialised or unpipelined
matrix instructions (C75xx), on a missing architecture, on local memory, and where a kernel that
streams tensors has no 128-bit loads or stores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Instructions that must move 16 bytes somewhere in a kernel; the others have no arrays to stream.
VECTORISED = {
    "unscale_kernel": ("LDG", "STG"),
    "check_finite_kernel": ("LDG",),
    "grad_norm_kernel": ("LDG",),
    "cast_kernel": ("LDG", "STG"),
}


@dataclass
class Kernel:
    """One kernel for one architecture; memory in bytes."""

    name: str
    arch: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0
    instructions: Counter = field(default_factory=Counter)

    def count(self, pattern: str) -> int:
        """How many instructions match, such as `LDG.*[.]128`."""
        return sum(n for name, n in self.instructions.items() if re.fullmatch(pattern, name))


Kernels = dict[tuple[str, str], Kernel]  # by mangled name and architecture


def read_ptxas(log: str, kernels: Kernels) -> None:
    """Add the kernels of an nvcc log written with -Xptxas=-v."""
    kernel = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel = kernels[match.groups()] = Kernel(*match.groups())
        elif match := re.search(r"(\d+) bytes stack.* (\d+) bytes.* stores, (\d+) bytes", line):
            stack, stores, loads = map(int, match.groups())
            kernel.stack += stack
            kernel.spills += stores + loads
        elif match := re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", line):
            kernel.registers = int(match[1])
            kernel.shared = int(match[2] or 0)


def read_sass(sass: str, kernels: Kernels) -> None:
    """Add the instructions that `cuobjdump -sass` shows, predicates left out."""
    arch = kernel = None
    for line in sass.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif match := re.match(r"\s+Function : (\S+)", line):
            kernel = kernels.setdefault((match[1], arch), Kernel(match[1], arch))
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)", line):
            kernel.instructions[match[1]] += 1


def remarks(log: str) -> list[str]:
    """The lines in which ptxas says that it serialised or did not pipeline matrix instructions."""
    return [line for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)]


def faults(kernel: Kernel) -> list[str]:
    """What is wrong with one kernel."""
    found = []
    if kernel.registers == 0:
        found.append("ptxas said nothing about it")
    if not kernel.instructions:
        found.append("it is not in the binary")
    if kernel.spills:
        found.append(f"{kernel.spills} bytes of registers spilled")
    if local := kernel.count("(LDL|STL).*"):
        found.append(f"{local} loads and stores of local memory")
    for name, needed in VECTORISED.items():
        if name in kernel.name:
            found += [f"no {op}.128" for op in needed if not kernel.count(rf"{op}\..*\b128\b.*")]
    return found


def missing(kernels: Kernels, arches: list[str]) -> list[str]:
    """Architectures without machine code, and names in VECTORISED that no kernel bears."""
    wanted = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in arches}
    built = {kernel.arch for kernel in kernels.values() if kernel.instructions}
    found = [f"no kernel for {arch}" for arch in sorted(wanted - built)]
    names = " ".join(name for name, _ in kernels)
    return found + [f"no kernel is called {name}" for name in VECTORISED if name not in names]


def readable(name: str) -> str:
    """A kernel's name without its namespaces and parameters."""
    full = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(anonymous namespace\)::|\w+::|\(.*|^void ", "", full.strip())


def main() -> int:
    import torch

    import amp_ext
    from amp_ext import _build_info

    # As setup.build_folder names it.
    folder = ROOT / f"build/{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}-cuda"
    sources = sorted((ROOT / "csrc/kernels").rglob("*.cu"))
    logs = [(folder / f"{source.relative_to(ROOT)}.o.log").read_text() for source in sources]
    tools = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin"
    sass = subprocess.run(
        ["cuobjdump", "-sass", amp_ext._C.__file__],
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    kernels: Kernels = {}
    for log in logs:
        read_ptxas(log, kernels)
    read_sass(sass, kernels)
    problems = missing(kernels, _build_info.CUDA_ARCHES)
    problems += [line for log in logs for line in remarks(log)]

    print(f"{'kernel':<48}{'arch':<8}{'regs':>5}{'smem':>8}{'stack':>7}{'spills':>8}{'size':>7}")
    for kernel in sorted(kernels.values(), key=lambda kernel: (kernel.name, kernel.arch)):
        name = readable(kernel.name)
        problems += [f"{name} for {kernel.arch}: {fault}" for fault in faults(kernel)]
        print(
            f"{name:<48}{kernel.arch:<8}{kernel.registers:>5}{kernel.shared:>8}"
            f"{kernel.stack:>7}{kernel.spills:>8}{kernel.instructions.total():>7}"
        )
    print("shared memory, stack and spills in bytes, size in instructions")
    for problem in problems:
        print(f"cuda-check: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
