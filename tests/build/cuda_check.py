"""Check the machine code of CUDA kernels and the remarks of ptxas, without a GPU.

    python tests/build/cuda_check.py

`make cuda-check` runs it with a Python that has amp_ext built from this tree. It checks the kernels
of that build, and compiles the kernels of tests/probe with warnings of nvcc as errors.

It fails on:

- a stack, local memory such as spilled registers, and a missing architecture;
- ptxas remarks about serialised or unpipelined matrix instructions (C75xx);
- a kernel without the instructions it was written for;
- a list kernel that keeps too few bytes of loads in flight;
- a norm kernel that converts too many values to FP64 between loads;
- a kernel for 9.0 or later that accesses memory or exits before it waits for the previous kernel,
  or never lets the next one begin;
- a launch for one tensor with too many bytes of parameters;
- an sm_90a GEMM with too many instructions between TMA stores, or a division in its consumers;
- an sm_80 GEMM whose epilogue drops accumulators between its passes;
- a library with too many kernels or bytes.
"""

import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gemm_code
from probe import nvcc
from sass import REGISTERS, Kernel, Kernels, common_faults, cuobjdump, read_kernels

ROOT = Path(__file__).resolve().parents[2]

# Instructions required of kernels by name: 16 bytes at a time in streams of tensors, tensor cores,
# and the copies that feed them. The first seven tiles of gemm are for aligned operands.
NEEDED = {
    "unscale_kernel": ("LDG.128", "STG.128"),
    "check_finite_kernel": ("LDG.128",),
    "grad_norm_kernel": ("LDG.128",),
    "gemm_sm90_kernel": ("UTMALDG", "HGMMA", "STSM", "UTMASTG", "UTMAREDG", "USETMAXREG"),
    "cast_kernel": ("LDG.128", "STG.128"),
    "adam_kernel": ("LDG.128", "STG.128", "LDG.64", "STG.64"),
    "sgd_kernel": ("LDG.128", "STG.128", "LDG.64", "STG.64"),
    "gemm_kernel": ("LDSM", "HMMA.16816", "LDG.128", "STG.128"),
    r"gemm_kernelI\w+?Li[0-6]E": ("LDGSTS.128",),
}


# How global memory is accessed, and how a thread ends.
ACCESSES = (
    *("LD", "LDG", "LDGSTS", "ST", "STG", "RED", "REDG", "ATOM", "ATOMG"),
    *("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
)
ENDS = ("EXIT", "RET", "BRX", "JMX")


class Walk(NamedTuple):
    """Require loads of kernels that read a list, to reach the memory's bandwidth."""

    kernels: str  # a pattern of their names
    loops: int  # that keep many loads in flight: one for each dtype or pair of dtypes
    least: int  # KiB in flight for each multiprocessor
    width: int = 16  # of the loads that count, at least, in bytes
    header: str = "lists/foreach.cuh"  # with the threads and the blocks for each multiprocessor
    prefix: str = "kForeach"  # of these constants' names


UPDATE = {"header": "optim/update.cuh", "prefix": "kUpdate"}
# unscale has each loop with stores and without. Updates have one, for FP32, and SGD loads three
# tensors.
WALKS = (
    Walk("unscale_kernel", 8, 64),
    Walk("check_finite_kernel|grad_norm_kernel", 4, 64),
    Walk("cast_kernel", 14, 64, width=4),
    Walk("cast_kernel", 16, 32, width=4),  # also from 16 bits to FP64
    Walk("adam_kernel.*InlineTable", 1, 64, **UPDATE),
    Walk("adam_kernel.*DeviceTable", 1, 48, **UPDATE),
    Walk("sgd_kernel", 1, 48, **UPDATE),
)
# Conversions of grad_norm for each batch of loads: many GPUs have one fp64 unit for 64 of fp32.
MOST_CONVERSIONS = 1

# Bytes of parameters of a launch for one tensor. All are copied at each launch.
MOST_CONSTANTS = 4 << 10

# Bounds of the library with all architectures: its build takes minutes, and programs load it.
MOST_KERNELS = 450
MOST_BYTES = 40 << 20


def loads(kernel: Kernel) -> Iterator[str]:
    """Yield the faults of a list kernel that keeps too few bytes in flight.

    The bytes are those of a thread's loads, times the threads of the resident blocks, while every
    thread waits.
    """
    for walk in WALKS:
        if not re.search(walk.kernels, kernel.name) or not kernel.registers:
            continue
        text = (ROOT / "csrc/kernels" / walk.header).read_text()
        threads, most = (
            int(re.search(rf"constexpr int {walk.prefix}{constant} = (\d+);", text)[1])
            for constant in ("Threads", "BlocksPerSm")
        )
        blocks = min(most, REGISTERS // (threads * kernel.warp_registers))
        found = kernel.bytes_in_flight(walk.loops, walk.width) * threads * blocks
        if found < walk.least << 10:
            yield f"{found} bytes in flight in {walk.loops} loops, {walk.least} KiB are needed"


def early_grid(kernel: Kernel) -> list[str]:
    """Return the faults of a kernel that begins before the previous kernel has ended.

    Such a kernel has one wait (ACQBULK), before anything else on every path. Later it allows the
    next kernel to begin (PREEXIT).
    """
    if "_kernel" not in kernel.name or kernel.capability < 90:
        return []
    waits = [i for i, name in enumerate(kernel.sequence) if name == "ACQBULK"]
    if len(waits) != 1:
        return [f"{len(waits)} waits for the grid before, 1 is needed"]
    before = (name for name in kernel.sequence[: waits[0]] if name.split(".")[0] in ACCESSES + ENDS)
    past = (f"a jump to {to}" for at, to in kernel.jumps.items() if at < waits[0] < to)
    found = [f"{what} comes before the wait for the grid before" for what in (*before, *past)]
    return found if kernel.count("PREEXIT") else [*found, "it lets no other grid begin"]


def faults(kernel: Kernel) -> list[str]:
    """Return the faults of one kernel."""
    needed = [what for name, what in NEEDED.items() if re.search(name, kernel.name)]
    found = common_faults(kernel, chain(*needed))
    if "grad_norm_kernel" in kernel.name and kernel.conversions > MOST_CONVERSIONS:
        found.append(f"{kernel.conversions} conversions to FP64, {MOST_CONVERSIONS} is allowed")
    found += loads(kernel)
    found += early_grid(kernel)
    if "gemm_sm90_kernel" in kernel.name and kernel.count("UTMASTG"):
        found += gemm_code.faults_of_sm90(kernel)
    return found


def large_launches(kernels: Kernels) -> list[str]:
    """Return launches for one tensor with too many bytes of parameters: the least table in them.

    The executor's tests assert that such a launch uses the least table.
    """
    least: dict[tuple[str, str], int] = {}
    for kernel in kernels.values():
        op = re.search(r"[a-z_]+(sm90_)?kernel", kernel.name)
        if op and "DeviceTable" not in kernel.name:
            key = op[0], kernel.arch
            least[key] = min(kernel.constants or sys.maxsize, least.get(key, sys.maxsize))
    return [
        f"{op} for {arch}: no table has less than {count} bytes, {MOST_CONSTANTS} are allowed"
        for (op, arch), count in least.items()
        if count > MOST_CONSTANTS
    ]


def installed() -> tuple[Path, str]:
    """Return the installed library and the logs of its kernels."""
    from amp_ext._library import LIBRARIES

    # setup.py names the folder; of several toolkits' folders, the newest counts.
    folder = max(ROOT.glob("build/cuda[0-9]*"), key=lambda path: path.stat().st_mtime)
    logs = []
    for source in (ROOT / "csrc/kernels").rglob("*.cu"):
        (log,) = folder.glob(f"CMakeFiles/*/{source.relative_to(ROOT / 'csrc')}.o.log")
        logs.append(log.read_text())
    return LIBRARIES[-1], "".join(logs)


def main() -> int:
    from amp_ext._library import CUDA_ARCHES

    library, log = installed()
    kernels = read_kernels(library)
    problems = large_launches(kernels) + gemm_code.faults_of_sm80(cuobjdump(library, "-ptx"))
    wanted = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in CUDA_ARCHES}
    missing = wanted - {kernel.arch for kernel in kernels.values()}
    problems += [f"no kernel for {arch}" for arch in sorted(missing)]
    size = f"{len(kernels)} kernels of {MOST_KERNELS}"
    size += f", {library.stat().st_size} bytes of {MOST_BYTES} that are allowed"
    if len(kernels) > MOST_KERNELS or library.stat().st_size > MOST_BYTES:
        problems.append(f"the library is too large: {size}")

    probes, log_of_probes = nvcc.compile()
    kernels |= read_kernels(probes)
    for name in NEEDED:
        if not any(re.search(name, kernel.name) for kernel in kernels.values()):
            problems.append(f"no kernel is called {name}")
    problems += re.findall(r".*\bC75\d\d\b.*", log + log_of_probes)
    for (name, arch), kernel in sorted(kernels.items()):
        problems += [f"{name} for {arch}: {fault}" for fault in faults(kernel)]
    print(size)
    for problem in problems:
        print(f"cuda-check: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
