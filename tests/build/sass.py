"""Read kernels from machine code by cuobjdump, and find the faults that all kernels may have."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

BYTES = 16  # of an instruction
JUMPS = ("BRA", "BSSY", "JMP", "CALL")
REGISTERS = 65536  # of a multiprocessor


@dataclass
class Kernel:
    """Describe one kernel for one architecture, with memory in bytes.

    Attributes:
        sequence: the instructions in their order.
        jumps: from places in it to others.
        constants: bytes of the bank with its parameters, after a few hundred others.
        batches: bytes of each global load that a thread issues before it uses the first of them.
        conversions: the most from fp32 to fp64 without a load or a branch between them.
    """

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    constants: int = 0
    sequence: list[str] = field(default_factory=list)
    jumps: dict[int, int] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    conversions: int = 0

    @property
    def capability(self) -> int:
        """Return the compute capability, such as 90 for sm_90a."""
        return int(re.sub(r"\D", "", self.arch))

    @property
    def warp_registers(self) -> int:
        """Return the registers of a warp, which come in units of 256, for each thread."""
        return (self.registers + 7) // 8 * 8

    def count(self, wanted: str) -> int:
        """Count the `wanted` instructions; LDG.128 is any LDG with 128 among its suffixes."""
        opcode, *suffixes = wanted.split(".")
        parts = (name.split(".") for name in self.sequence)
        return sum(first == opcode and {*suffixes} <= {*rest} for first, *rest in parts)

    def bytes_in_flight(self, loops: int, width: int) -> int:
        """Return the bytes that a thread loads before the first use in at least `loops` loops, by
        loads of at least `width` bytes.
        """
        batches = (sum(size for size in batch if size >= width) for batch in self.batches)
        return sorted([*batches, *loops * [0]], reverse=True)[loops - 1]


Kernels = dict[tuple[str, str], Kernel]  # by mangled name and architecture


def cuobjdump(library: Path, option: str) -> str:
    """Return the output of cuobjdump; its helper nvdisasm comes with torch's Triton, as it does
    itself.
    """
    import torch

    tools = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin"
    return subprocess.run(
        ["cuobjdump", option, str(library)],
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def read_kernels(library: Path) -> Kernels:
    """Read the kernels of a library or a cubin, which names no architecture."""
    kernels: Kernels = {}
    read_sass(cuobjdump(library, "-sass"), kernels)
    kernel, arch = None, ""
    for line in cuobjdump(library, "-res-usage").splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif match := re.match(r" Function (\S+):", line):
            kernel = kernels[match[1], arch]
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) .*CONSTANT\[0\]:(\d+)", line):
            kernel.registers, kernel.stack, kernel.constants = map(int, match.groups())
    return kernels


def common_faults(kernel: Kernel, needed: Iterable[str]) -> list[str]:
    """Return the faults of a kernel that needs some instructions."""
    found = []
    if kernel.registers == 0:
        found.append("cuobjdump said nothing about its registers")
    if kernel.stack:
        found.append(f"{kernel.stack} bytes of stack")
    if local := kernel.count("LDL") + kernel.count("STL"):  # spilled registers, indexed arrays
        found.append(f"{local} loads and stores of local memory")
    return found + [f"no {wanted}" for wanted in needed if not kernel.count(wanted)]


class _Batch:
    """Collect the loads since the first unused load."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.loads: list[int] = []  # bytes
        self.arriving: set[int] = set()  # registers
        self.conversions = 0

    def add(self, name: str, operands: str) -> None:
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if self.arriving & set(registers) or name.startswith(("BRA", "EXIT", "RET", "BAR")):
            self.close()
        if name.startswith("F2F.F64.F32"):
            self.conversions += 1
            self.kernel.conversions = max(self.kernel.conversions, self.conversions)
        elif name.startswith(("BRA", "LDG")):
            self.conversions = 0
        if name.startswith("LDG."):
            size = next((int(bits) // 8 for bits in re.findall(r"\.[US]?(8|16|64|128)\b", name)), 4)
            self.loads.append(size)
            self.arriving |= set(range(registers[0], registers[0] + (size + 3) // 4))

    def close(self) -> None:
        if self.loads:
            self.kernel.batches.append(self.loads)
        self.loads = []
        self.arriving.clear()


def read_sass(sass: str, kernels: Kernels) -> None:
    """Add the instructions shown by `cuobjdump -sass`, without predicates."""
    batch, arch = None, ""
    instruction = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)([^;]*)")
    for line in sass.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif match := re.match(r"\s+Function : (\S+)", line):
            batch = _Batch(kernels.setdefault((match[1], arch), Kernel(match[1], arch)))
        elif match := instruction.match(line):
            if match[1].startswith(JUMPS) and (target := re.search(r"0x([0-9a-f]+)", match[2])):
                batch.kernel.jumps[len(batch.kernel.sequence)] = int(target[1], 16) // BYTES
            batch.kernel.sequence.append(sys.intern(match[1]))
            batch.add(match[1], match[2])
