"""tests/triton_check.py: it accepts a good kernel and names what is wrong with a bad one."""

from __future__ import annotations

import pytest

from sass import Kernel, Kernels, read_sass, read_usage
from triton_check import SHARED_LIMITS, faults, missing
from triton_variants import Variant

USAGE = """\
Resource usage:
 Common:
  GLOBAL:0
 Function cast_kernel:
  REG:56 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:384 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """\
Fatbin elf code:
================
arch = sm_90
\tcode for sm_90
\t\tFunction : cast_kernel
        /*0010*/              @!P1 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/                   STG.E.128 desc[UR6][R8.64], R4 ;
"""
NEEDED = ("LDG.E.128", "STG.E.128")


def checked(usage: str = USAGE, sass: str = SASS, shared: int = 16 << 10) -> list[str]:
    kernels: Kernels = {}
    read_sass(sass, kernels)
    read_usage(usage, kernels)
    kernel = kernels.get(("cast_kernel", "sm_90"), Kernel("cast_kernel", "sm_90"))
    kernel.shared = shared
    return faults(kernel, NEEDED, SHARED_LIMITS[90])


def test_a_good_kernel_passes() -> None:
    assert checked() == []


def test_what_is_read() -> None:
    kernels: Kernels = {}
    read_sass(SASS, kernels)
    read_usage(USAGE.replace("STACK:0", "STACK:8"), kernels)
    (kernel,) = kernels.values()
    assert (kernel.registers, kernel.stack, kernel.shared) == (56, 8, 1024)
    assert kernel.instructions.total() == 2


@pytest.mark.parametrize(
    ("usage", "sass", "fault"),
    [
        (USAGE.replace("STACK:0", "STACK:8"), SASS, "8 bytes of stack"),
        (USAGE, SASS + "        /*0030*/   @P1 LDL.64 R4, [R1] ;", "1 loads and stores of local"),
        (USAGE, SASS + "        /*0030*/       STL [R1], R4 ;", "1 loads and stores of local"),
        (USAGE, SASS.replace("LDG.E.128", "LDG.E.64"), "no LDG.E.128"),
        (USAGE, SASS.replace("STG.E.128", "STG.E"), "no STG.E.128"),
        (USAGE, "", "no machine code"),
        ("", SASS, "nothing about its registers"),
    ],
)
def test_a_bad_kernel_is_seen(usage: str, sass: str, fault: str) -> None:
    assert fault in " ".join(checked(usage, sass))


@pytest.mark.parametrize(("arch", "limit"), [(80, 166_912), (90, 232_448), (100, 232_448)])
def test_too_much_shared_memory_is_seen(arch: int, limit: int) -> None:
    kernels: Kernels = {}
    read_sass(SASS, kernels)
    read_usage(USAGE, kernels)
    (kernel,) = kernels.values()
    kernel.shared = limit
    assert faults(kernel, NEEDED, SHARED_LIMITS[arch]) == []
    kernel.shared += 1
    (fault,) = faults(kernel, NEEDED, SHARED_LIMITS[arch])
    assert fault.startswith(f"{limit + 1} bytes of shared memory")


def test_a_kernel_without_a_variant_is_seen() -> None:
    kernels = {"cast_kernel": object(), "gemm_kernel": object()}
    variants = [Variant("cast", kernels["cast_kernel"], {})]
    assert missing(kernels, variants) == ["no variant of gemm_kernel is checked"]
    assert missing({}, variants) == []
