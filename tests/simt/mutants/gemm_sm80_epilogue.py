"""Mutants of the epilogue of the GEMM kernel for sm_80, csrc/kernels/gemm/sm80."""

from __future__ import annotations

from simt.build import FEW_TILES
from simt.mutants.gemm_sm80 import gemm_mutant
from simt.mutants.mutant import Mutant

EPILOGUE, VECTOR, ACTIVATION = (
    f"gemm/{name}.cuh" for name in ("sm80/epilogue", "sm80/vector8", "shared/activation")
)
EPILOGUES = (
    f"{FEW_TILES} and (all_at_once or sums_of_many) or "
    "not True and "
    "(layouts_of_c or test_bias or test_activation or test_derivative or tails_are_kept)"
)
ALL = f"{FEW_TILES} and all_at_once"
SUMS_RACE = {"tests": "gemm_kernels_epilogue", "select": f"{ALL} and fp32", "variant": "tsan"}


def _epilogue(name: str, file: str, old: str, new: str, select: str = EPILOGUES) -> Mutant:
    return gemm_mutant(name, file, old, new, "gemm_kernels_epilogue", select)


STAGED = "    ptx::warp_sync();\n#pragma unroll 1\n"
STAGE_AGAIN = "    ptx::warp_sync();\n#pragma unroll\n"

MUTANTS = (
    _epilogue("staged rows are read too early", EPILOGUE, STAGED, "#pragma unroll 1\n"),
    gemm_mutant("staged rows are overwritten", EPILOGUE, STAGE_AGAIN, "#pragma unroll\n"),
    gemm_mutant(
        "the first sums are staged again",
        EPILOGUE,
        "sums[i - kStagedParts][j][l] = sums[i][j][l];",
        ";",
    ),
    gemm_mutant(
        "rows beyond the edge are written", EPILOGUE, "row >= rows || count == 0", "count == 0"
    ),
    gemm_mutant(
        "columns beyond the edge are whole",
        EPILOGUE,
        "left < kVector ? static_cast<int>(left) : kVector",
        "kVector",
    ),
    gemm_mutant(
        "rows of no matrix are written",
        EPILOGUE,
        "g.batch == 0 ? 0 : g.m",
        "g.m",
        select="test_edges and [0- and not (sizes4 or sizes5 or sizes6)",
    ),
    _epilogue(
        "aux is stored behind the activation",
        EPILOGUE,
        "    if (g.aux.data) store_vector(g.aux, place, x);\n    activate(g.activation, x);\n",
        "    activate(g.activation, x);\n    if (g.aux.data) store_vector(g.aux, place, x);\n",
    ),
    _epilogue(
        "a shuffle too few",
        EPILOGUE,
        "int mask = kVectors; mask < 32",
        "int mask = kVectors; mask < 16",
    ),
    _epilogue(
        "column sums over staged rows",
        EPILOGUE,
        "  ptx::block_sync();  // all staged sums have been read\n",
        "",
    ),
    _epilogue(
        "column sums are read too early", EPILOGUE, "  }\n  ptx::block_sync();\n\n", "  }\n\n"
    ),
    _epilogue(
        "column sums count splits",
        EPILOGUE,
        "plan.units / plan.splits / plan.tiles_n",
        "plan.units / plan.tiles_n",
    ),
    _epilogue(
        "rows of tiles of one matrix", EPILOGUE, "work.batch * plan.tiles_m + work.m;", "work.m;"
    ),
    _epilogue("one group too few", EPILOGUE, "i < kGroups; ++i)\n", "i + 1 < kGroups; ++i)\n"),
    _epilogue(
        "groups are read too early",
        EPILOGUE,
        "= sum;\n  ptx::block_sync();\n  for",
        "= sum;\n  for",
    ),
    gemm_mutant(
        "column sums without a barrier, race",
        EPILOGUE,
        "  ptx::block_sync();\n  if (!is_last",
        "  if (!is_last",
        **SUMS_RACE,
    ),
    # ---- vectors of eight
    gemm_mutant("tails are written whole", VECTOR, "place.count == kVector &&", "true &&"),
    gemm_mutant("misaligned vectors", VECTOR, "&& reinterpret_cast<uintptr_t>(at) % 16 == 0", ""),
    _epilogue(
        "strided columns are taken for neighbours",
        VECTOR,
        "matrix.column_stride == 1 &&",
        "true &&",
    ),
    gemm_mutant(
        "what does not exist is read",
        VECTOR,
        "i < place.count ? Element<T>::widen(at[i * matrix.column_stride]) : 0.0f",
        "Element<T>::widen(at[i * matrix.column_stride])",
        "gemm_kernels_epilogue",
        "test_bias and not True",
        "asan",
    ),
    # ---- activations
    _epilogue(
        "gelu's tail cancels",
        ACTIVATION,
        "0.5f * erfcf(x * -0.70710678f)",
        "1.0f - 0.5f * erfcf(x * 0.70710678f)",
    ),
    _epilogue(
        "silu's derivative is that of a number nearer to 0",
        ACTIVATION,
        "at[i] > 128.0f ? 128.0f : at[i] < -128.0f ? -128.0f : at[i]",
        "at[i] > 4.0f ? 4.0f : at[i] < -4.0f ? -4.0f : at[i]",
    ),
    _epilogue(
        "NaN is bounded",
        ACTIVATION,
        ": at[i] < -128.0f ? -128.0f : at[i]",
        ": at[i] > -128.0f ? at[i] : -128.0f",
    ),
    _epilogue(
        "tickets of tiles and columns are the same",
        EPILOGUE,
        "tickets + plan.column_tickets + work.n",
        "tickets + work.n",
        ALL,
    ),
)
