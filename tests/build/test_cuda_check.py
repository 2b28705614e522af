"""Test that tests/build/cuda_check.py accepts a good kernel and names a bad one's fault."""

from __future__ import annotations

import pytest

import cuda_check
import ptx_gemm
import sass_gemm
from sass import Kernel, Kernels, read_ptxas, read_sass

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'unscale_kernel' for 'sm_80'
ptxas info    : Function properties for unscale_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 2048 bytes smem, 384 bytes cmem[0]
"""
LOOP = """\
        /*0010*/                   LDG.E.128 R4, [R2.64] ;    /* 0x00000a00ff017624 */
                                                              /* 0x000fe400078e00ff */
        /*0020*/                   LDG.E.128 R8, [R2.64+0x2000] ;
        /*0030*/                   LDG.E.128 R12, [R2.64+0x4000] ;
        /*0040*/              @!P1 LDG.E.128 R16, [R2.64+0x6000] ;
        /*0050*/                   FMUL R5, R4, R20 ;
        /*0060*/              @!P0 STG.E.128 [R2.64], R4 ;    /* 0x0000000000007919 */
        /*0070*/               @P0 BRA 0x10 ;
"""
SASS = f"""\
Fatbin elf code:
================
arch = sm_80
\tcode for sm_80
\t\tFunction : unscale_kernel
{8 * LOOP}"""
CHAINED = SASS
for _to, _from in ((16, 12), (12, 8), (8, 4)):
    CHAINED = CHAINED.replace(f"R{_to}, [R2.64", f"R{_to}, [R{_from}.64")
CONVERTS = SASS.replace("FMUL R5, R4, R20 ;", "F2F.F64.F32 R22, R5 ; ".ljust(20)).replace(
    "@!P0 STG.E.128 [R2.64], R4", "F2F.F64.F32 R22, R5"
)


def read(ptxas: str, sass: str) -> Kernel:
    kernels: Kernels = {}
    read_ptxas(ptxas, kernels)
    read_sass(sass, kernels)
    (kernel,) = kernels.values()
    return kernel


@pytest.mark.parametrize(
    ("ptxas", "sass", "fault"),
    [
        (PTXAS, SASS, ""),
        (PTXAS.replace("0 bytes spill loads", "8 bytes spill loads"), SASS, "8 bytes of registers"),
        (PTXAS, SASS.replace("LDG.E.128", "LDG.E.64"), "no LDG.128"),
        (PTXAS, CHAINED, "16384 bytes in flight"),
        (PTXAS.replace("64 reg", "65 reg"), CHAINED, "8192 bytes in flight"),
        (PTXAS, SASS + "        /*0020*/   @P1 LDL.64 R4, [R1] ;", "1 loads and stores of local"),
        (PTXAS, "", "not in the binary"),
        ("", SASS, "ptxas said nothing"),
        (
            PTXAS.replace("unscale", "grad_norm"),
            CONVERTS.replace("unscale", "grad_norm"),
            "2 conversions to FP64",
        ),
    ],
)
def test_kernels(ptxas: str, sass: str, fault: str) -> None:
    found = cuda_check.faults(read(ptxas, sass))
    assert fault in " ".join(found)
    assert bool(found) == bool(fault)


WAIT, LOAD, LATER = "/*0020*/ ACQBULK ;", "/*0030*/ LDG.E R0, [R2.64] ;", "/*0050*/ PREEXIT ;"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (("/*0000*/ @P0 BRA 0x20 ;", "/*0010*/ NOP ;", WAIT, LOAD, LATER), ""),
        ((LOAD, LATER), "0 waits"),
        ((WAIT, LOAD), "no other grid"),
        ((LOAD, WAIT, LATER), "LDG.E comes before"),
        (("/*0000*/ @P0 BRA 0x30 ;", "/*0010*/ NOP ;", WAIT, LOAD, LATER), "a jump to 3 comes"),
    ],
)
def test_grid_that_begins_early(code: tuple[str, ...], fault: str) -> None:
    """Code of 9.0 or later waits for the previous grid before anything else, on every path."""
    sass = SASS.replace("sm_80", "sm_90a").replace(8 * LOOP, "".join(f"    {x}\n" for x in code))
    found = cuda_check.early_grid(read("", sass))
    assert fault in " ".join(found)
    assert bool(found) == bool(fault)


def gemm_sm90(boxes: int = 8, slots: int = 100, consumer: str = "FMUL") -> Kernel:
    """Return an instance with a tile of 128 columns and consumers of 64 rows."""
    (number,) = (i for i, tile in enumerate(sass_gemm.tiles()) if tile == (64, 128, True))
    box = ["FMUL"] * (slots - 1) + ["UTMASTG.3D"]
    consumers = ["USETMAXREG.TRY_ALLOC.CTAPOOL", consumer, "UTMASTG.3D", *boxes * box]
    producers = ["USETMAXREG.DEALLOC.CTAPOOL", "I2F.U32.RP"]
    return Kernel(f"gemm_sm90_kernelI6__halfLi{number}EL", "sm_90a", sequence=consumers + producers)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (gemm_sm90(), ""),
        (gemm_sm90(slots=sass_gemm.MOST_SLOTS + 1), "instructions a box"),
        (gemm_sm90(boxes=7), "instructions a box"),
        (gemm_sm90(consumer="I2F.RP"), "1 integer divisions"),
    ],
)
def test_sass_between_tiles(kernel: Kernel, fault: str) -> None:
    assert fault in " ".join(sass_gemm.faults(kernel))
    assert bool(fault) == bool(sass_gemm.faults(kernel))


def gemm_ptx(tile: int, handed_on: int) -> str:
    """Return an instance with an epilogue that moves so many sums to its next pass."""
    rows, _ = ptx_gemm.tiles()[tile]
    name = f"_ZN7amp_ext11gemm_kernelI6__halfLi{tile}ELNS_5MajorE0ELS2_0EEEvNS_8GemmArgsE"
    moves = "".join(f"\tmov.u32 \t%r{i}, %r{i + 500};\n" for i in range(handed_on))
    return (
        f".visible .entry {name}(\n)\n{{\n$L__BB0_99:\n\tst.shared.v2.f32 \t[%r9], {{%f1, %f2}};\n"
        f"\tadd.s32 \t%r900, %r900, 32;\n\tsetp.lt.u32 \t%p433, %r900, {rows};\n"
        f"{moves}\t@%p433 bra \t$L__BB0_99;\n\n\tret;\n}}\n"
    )


SUMS = (64, 64, 32, 0, 0, 0, 0, 0, 0)
"""Of each tile, that a thread hands on."""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({2: 20}, "20 of 32 sums"),  # as nvcc made of a memcpy
        ({8: None}, "no PTX of gemm_kernel for tiles [8]"),
    ],
)
def test_epilogue_that_loses_sums(change: dict[int, int | None], fault: str) -> None:
    sums = {**dict(enumerate(SUMS)), **change}
    ptx = "".join(gemm_ptx(tile, count) for tile, count in sums.items() if count is not None)
    found = ptx_gemm.faults(ptx)
    assert fault in " ".join(found)
    assert len(found) == bool(fault)


def test_libraries() -> None:
    """A library lacks no architecture or kernel, is not too large, and has no remarks.

    A launch for one tensor has few bytes of parameters.
    """
    remark = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"
    assert cuda_check.remarks(f"{PTXAS}{remark}\n") == [remark]
    kernels = {("unscale_kernel", "sm_80"): read(PTXAS, SASS)}
    assert cuda_check.missing_arches(kernels, ["8.0+PTX", "9.0a"]) == ["no kernel for sm_90a"]
    missing = cuda_check.missing_names(kernels)
    assert missing == [f"no kernel is called {name}" for name in [*cuda_check.NEEDED][1:]]
    assert cuda_check.excess(kernels, cuda_check.MOST_BYTES) == []
    assert "41943041 bytes" in cuda_check.excess(kernels, cuda_check.MOST_BYTES + 1)[0]
    kernels["unscale_kernel", "sm_80"].constants = cuda_check.MOST_CONSTANTS + 1
    assert "no table has less than 4097 bytes" in cuda_check.large_launches(kernels)[0]
