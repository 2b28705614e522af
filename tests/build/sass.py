"""Read kernels from the output of ptxas and cuobjdump."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

BYTES = 16  # of an instruction
JUMPS = ("BRA", "BSSY", "JMP", "CALL")


@dataclass
class Kernel:
    """Describe one kernel for one architecture, with memory in bytes.

    Attributes:
        sequence: the instructions in their order.
        jumps: from places in it to others.
        constants: bytes of the bank with its parameters, after a few hundred others.
        instructions: how often each occurs.
        batches: bytes of each global load that a thread issues before it uses the first of them.
        conversions: the most from fp32 to fp64 without a load or a branch between them.
    """

    name: str
    arch: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0
    constants: int = 0
    sequence: list[str] = field(default_factory=list)
    jumps: dict[int, int] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)
    batches: list[list[int]] = field(default_factory=list)
    conversions: int = 0

    @property
    def capability(self) -> int:
        """Return the compute capability, such as 90 for sm_90a."""
        return int(re.sub(r"\D", "", self.arch))

    def count(self, wanted: str) -> int:
        """Count the `wanted` instructions; LDG.128 is any LDG with 128 among its suffixes."""
        opcode, *suffixes = wanted.split(".")
        return sum(
            number
            for name, number in self.instructions.items()
            if name.split(".")[0] == opcode and set(suffixes) <= set(name.split("."))
        )

    def bytes_in_flight(self, loops: int, width: int) -> int:
        """Return the bytes that a thread loads before the first use in at least `loops` loops, by
        loads of at least `width` bytes.
        """
        batches = (sum(size for size in batch if size >= width) for batch in self.batches)
        return sorted([*batches, *loops * [0]], reverse=True)[loops - 1]


Kernels = dict[tuple[str, str], Kernel]  # by mangled name and architecture


def read_ptxas(log: str, kernels: Kernels) -> None:
    """Add the kernels of an nvcc log written with -Xptxas=-v."""
    kernel = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel = kernels[match.groups()] = Kernel(*match.groups())
        elif match := re.search(r" (\d+) bytes spill stores, (\d+) bytes", line):
            kernel.spills += sum(map(int, match.groups()))
        elif match := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(match[1])


def read_usage(usage: str, kernels: Kernels) -> None:
    """Add the output of `cuobjdump -res-usage` to kernels that have been read."""
    for name, registers, stack, shared in re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage
    ):
        for kernel in kernels.values():
            if kernel.name == name:
                kernel.registers, kernel.stack, kernel.shared = map(int, (registers, stack, shared))


def read_constants(usage: str, kernels: Kernels) -> None:
    """Add the constants of a library's kernels from `cuobjdump -res-usage`."""
    for section in usage.split("\narch = ")[1:]:
        arch = section.partition("\n")[0]
        for name, count in re.findall(r"Function (\S+):\s.*CONSTANT\[0\]:(\d+)", section):
            kernels[name, arch].constants = int(count)


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
    arch = batch = None
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
            batch.kernel.instructions[match[1]] += 1
            batch.add(match[1], match[2])
