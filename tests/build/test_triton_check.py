"""Test that triton_check.py accepts a good kernel and names each fault of a bad one."""

from __future__ import annotations

import os
import sys

import pytest

import programs
from amp_ext import _triton
from sass import Kernel, Kernels, read_sass, read_usage
from triton_check import SHARED_LIMITS, crowding, faults, order_faults
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


@pytest.mark.parametrize(
    ("usage", "sass", "fault"),
    [
        (USAGE, SASS, ""),
        (USAGE.replace("STACK:0", "STACK:8"), SASS, "8 bytes of stack"),
        (USAGE, SASS + "        /*0030*/   @P1 LDL.64 R4, [R1] ;", "1 loads and stores of local"),
        (USAGE, SASS.replace("LDG.E.128", "LDG.E.64"), "no LDG.E.128"),
        (USAGE.replace("SHARED:1024", "SHARED:232449"), SASS, "232449 bytes of shared memory"),
        ("", SASS, "nothing about its registers"),
    ],
)
def test_kernels(usage: str, sass: str, fault: str) -> None:
    kernels: Kernels = {}
    read_sass(sass, kernels)
    read_usage(usage, kernels)
    found = faults(kernels["cast_kernel", "sm_90"], NEEDED, SHARED_LIMITS[90])
    assert fault in " ".join(found)
    assert bool(found) == bool(fault)


def test_registers_of_a_launch_fit_a_multiprocessor() -> None:
    """A launch's registers are rounded up to 256 a warp."""
    variant = Variant("cast", None, {}, options={"num_warps": 8}, programs=4)
    assert crowding(Kernel("cast_kernel", "sm_90", registers=64), variant) == []
    (fault,) = crowding(Kernel("cast_kernel", "sm_90", registers=65), variant)
    assert fault == "registers for 3 programs a multiprocessor, a launch has 4"


LAST_READS = """\
	@%p4 bra 	$L__BB0_7;
	bar.sync 	0;  // of the sum
	@%p140 st.global.b64 [ %rd548 + 0 ], { %rd547 };
$L__BB0_7:
	@%p133 st.global.b32 [ %rd645 + 0 ], { %r406 };
	bar.sync 	0;  // stored
$L__tmp128:
	// begin inline asm
	@%p140 atom.global.gpu.acq_rel.add.u32 %r407, [ %rd599 + 0 ], %r408;
	@%p133 st.shared.b32 [ %r409 + 0 ], %r407;
	bar.sync 	0;  // drawn
	ld.shared.b32 	%r454, [global_smem];
	@%p135 bra 	$L__BB0_45;
	bar.sync 	0;  // drawn by the last
	@%p136 ld.global.cg.b64 { %rd590 }, [ %rd592 + 0 ];
	@%p140 st.global.b32 [ %rd51 + 0 ], { %r456 };
$L__BB0_45:
	ret;
"""


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ("	bar.sync 	0;  // stored\n", "", "no bar.sync right before the ticket"),
        ("	bar.sync 	0;  // drawn\n", "", "no bar.sync right after the ticket"),
        ("gpu.acq_rel.add", "gpu.relaxed.add", "the ticket is not drawn by an atom.acq_rel.gpu"),
        ("ld.global.cg", "ld.global", "no ld.global.cg after the ticket"),
    ],
)
def test_a_last_program_that_may_read_too_early_is_seen(
    there: str, instead: str, fault: str
) -> None:
    assert there in LAST_READS
    (found,) = order_faults(LAST_READS.replace(there, instead))
    assert fault in found
    assert order_faults(LAST_READS) == []


@pytest.mark.skipif(_triton.triton_version() is None, reason="Triton is not installed")
def test_no_number_compiles_a_kernel_of_lists_anew() -> None:
    """The key of a compiled list kernel is the same for every address and count."""
    program = """
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_variants import list_variants

backend = make_backend(GPUTarget("cuda", 90, 32))
for variant in list_variants():
    params = variant.kernel.params
    bind = create_function_from_signature(variant.kernel.signature, params, backend)
    keys = set()
    for number in (0, 1, 2, 16, 2**31, 2**40, 2**63 - 16, -16):
        for kind in (int, float):
            numbers = [
                kind(number) if parameter.annotation_type == "fp32" else number
                for parameter in params
                if not parameter.is_constexpr
            ]
            _, *key = bind(*numbers, **variant.constexprs, **variant.options, debug=False)
            keys.add(str(key))
    print(variant.name, len(keys))
"""
    said = programs.output(program, TRITON_INTERPRET="0", PYTHONPATH=os.pathsep.join(sys.path))
    assert len(said.splitlines()) >= 8
    assert [line for line in said.splitlines() if not line.endswith(" 1")] == []
