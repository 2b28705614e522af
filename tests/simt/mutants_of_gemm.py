"""Mutants of the GEMM kernel, csrc/kernels/gemm."""

from __future__ import annotations

from simt.mutant import Mutant

OPERAND, MAINLOOP, SCHEDULER, SPLIT, EPILOGUE, VECTOR, ACTIVATION, GEMM, LAUNCH = (
    f"gemm/{name}"
    for name in (
        *("operand.cuh", "mainloop_sm80.cuh", "scheduler.cuh", "split.cuh", "epilogue.cuh"),
        *("vector8.cuh", "activation.cuh", "gemm.cuh", "gemm.cu"),
    )
)
ASAN = {"select": "test_tails and (nn or tt) or strides_of_single", "variant": "asan"}
RACE = {"select": "(test_tails or test_every_schedule) and (0 or tt)", "variant": "tsan"}
SPLIT_RACE = {"select": "error_is_that_of_a_sum and 40", "variant": "tsan"}
SUMS_RACE = {"tests": "gemm_kernels_epilogue", "select": "all_at_once", "variant": "tsan"}


def _mutant(
    name: str,
    file: str,
    old: str,
    new: str,
    tests: str = "gemm_kernels",
    select: str = "",
    variant: str = "plain",
) -> Mutant:
    return Mutant(name, file, old, new, tests, select, variant)


def _epilogue(name: str, file: str, old: str, new: str, select: str = "") -> Mutant:
    return _mutant(name, file, old, new, "gemm_kernels_epilogue", select)


STAGE_IS_FREE = "        ptx::cp_async_wait<kStages - 2>();\n        ptx::block_sync();\n"
FIRST_STEP = "  ptx::cp_async_wait<kStages - 2>();\n  ptx::block_sync();\n\n"
EMPTY_GROUP = "    }\n    ptx::cp_async_commit();\n"
ADD_IN_ORDER = (
    "  memset(sums, 0, sizeof(sums));\n  for (uint32_t split = 0; split < plan.splits; ++split) {\n"
)
STAGED = "    ptx::warp_sync();\n#pragma unroll 1\n"
STAGE_AGAIN = "    ptx::warp_sync();\n#pragma unroll\n"

MUTANTS = (
    # ---- operands
    _mutant("the swizzle's period is not 8 lines", OPERAND, "row % (8 / kRowLines)", "row % 8"),
    _mutant("parts of long lines overlap", OPERAND, "kRowChunks * kPartBytes +", "kRowChunks +"),
    _mutant(
        "halves of m and n change places",
        OPERAND,
        "matrix % 2 : matrix / 2;\n    const int k",
        "matrix / 2 : matrix % 2;\n    const int k",
    ),
    _mutant(
        "halves of k change places",
        OPERAND,
        "matrix / 2 : matrix % 2;\n    offset_",
        "matrix % 2 : matrix / 2;\n    offset_",
    ),
    _mutant("swizzled chunks are added up", OPERAND, "offset_ ^ chunks", "offset_ + chunks"),
    _mutant("fragments of eight lines", OPERAND, "lines * 2 * Tile", "lines * Tile"),
    _mutant(
        "rows beyond the edge are read",
        OPERAND,
        "(extent - first < kExtent ? extent - first : kExtent)",
        "(kExtent)",
        **ASAN,
    ),
    _mutant(
        "lines beyond the edge are read",
        OPERAND,
        "i * kPassLines < lines ? elements : 0",
        "elements",
    ),
    _mutant(
        "chunks are read whole",
        OPERAND,
        "length < kOperandChunk ? length : kOperandChunk;",
        "kOperandChunk;",
    ),
    _mutant("one step too far to the next matrix", OPERAND, "(steps - 1) * step", "steps * step"),
    _mutant("steps of one line", OPERAND, "kStep * line_stride_", "line_stride_"),
    _mutant(
        "all matrices are the first", OPERAND, "matrix * matrix_stride_ +", "0 * matrix_stride_ +"
    ),
    # ---- main loop
    _mutant(
        "refills before all have read", MAINLOOP, STAGE_IS_FREE, STAGE_IS_FREE.splitlines(True)[0]
    ),
    _mutant(
        "refills before all have read, race",
        MAINLOOP,
        STAGE_IS_FREE,
        STAGE_IS_FREE.splitlines(True)[0],
        **RACE,
    ),
    _mutant("wait one group short", MAINLOOP, STAGE_IS_FREE, STAGE_IS_FREE.replace("- 2", "- 1")),
    _mutant("first wait one group short", MAINLOOP, FIRST_STEP, FIRST_STEP.replace("- 2", "- 1")),
    _mutant(
        "no barrier before the first step, race",
        MAINLOOP,
        FIRST_STEP,
        FIRST_STEP.splitlines(True)[0],
        **RACE,
    ),
    _mutant(
        "no empty groups behind the last step",
        MAINLOOP,
        EMPTY_GROUP,
        "      ptx::cp_async_commit();\n    }\n",
    ),
    _mutant(
        "refills the stage that is read",
        MAINLOOP,
        "steps.fetch(stages[last])",
        "steps.fetch(stages[stage])",
    ),
    _mutant(
        "refills a step early", MAINLOOP, "if (depth == 0) steps", "if (depth == kDepths - 1) steps"
    ),
    _mutant(
        "staged while others read, race",
        MAINLOOP,
        "  }\n  ptx::block_sync();\n}",
        "  }\n}",
        **RACE,
    ),
    _mutant(
        "the next matrix has no tail",
        MAINLOOP,
        "      k_left_ = k_;\n",
        "      k_left_ = kTile.k;\n",
    ),
    _mutant(
        "the tail of k is not cut", MAINLOOP, "k_left_ < kTile.k ? k_left_ : kTile.k", "kTile.k"
    ),
    _mutant(
        "fragments of the depth before",
        MAINLOOP,
        "fragments[depth % 2].multiply",
        "fragments[(depth + 1) % 2].multiply",
    ),
    # ---- scheduler
    _mutant(
        "the last group is as tall as the others",
        SCHEDULER,
        "left < plan.group ? left : plan.group",
        "plan.group",
    ),
    _mutant(
        "shares begin too late", SCHEDULER, "split < longer ? split : longer", "longer", "gemm_plan"
    ),
    _mutant(
        "shares of a tile are those of a batch",
        SCHEDULER,
        "work.batch * plan.terms + term",
        "work.batch + term",
    ),
    _mutant("all tiles are shared", SCHEDULER, "unit < plan.whole", "false", "gemm_plan_sm90"),
    _mutant(
        "shared tiles have the numbers of whole ones",
        SCHEDULER,
        "plan.whole + shared / plan.splits",
        "shared / plan.splits",
        "gemm_plan_sm90",
    ),
    _mutant(
        "whole tiles have a share of the steps",
        SCHEDULER,
        "is_whole ? 1 : plan.splits",
        "plan.splits",
        "gemm_plan_sm90",
    ),
    _mutant("steps are not of their term", SCHEDULER, "begin - term * plan.term_steps", "begin"),
    # ---- splits
    _mutant(
        "shares lie over each other",
        SPLIT,
        "int64_t{work.tile} * plan.splits + split",
        "int64_t{work.tile} + split",
    ),
    _mutant(
        "no barrier before the ticket",
        SPLIT,
        "  ptx::block_sync();\n  if (!is_last",
        "  if (!is_last",
        **SPLIT_RACE,
    ),
    _mutant(
        "the last share is left out",
        SPLIT,
        "split < plan.splits; ++split",
        "split + 1 < plan.splits; ++split",
    ),
    _mutant(
        "added up as they come",
        SPLIT,
        ADD_IN_ORDER,
        ADD_IN_ORDER.partition("\n")[2] + "    if (split == work.split) continue;\n",
    ),
    _mutant("a share is added to itself", SPLIT, "  memset(sums, 0, sizeof(sums));\n", ""),
    _mutant("all tiles have one ticket", SPLIT, "tickets + work.tile,", "tickets,"),
    _epilogue(
        "tickets of tiles and columns are the same",
        EPILOGUE,
        "tickets + plan.column_tickets + work.n",
        "tickets + work.n",
        "all_at_once",
    ),
    # ---- epilogue
    _epilogue("staged rows are read too early", EPILOGUE, STAGED, "#pragma unroll 1\n"),
    _mutant("staged rows are overwritten", EPILOGUE, STAGE_AGAIN, "#pragma unroll\n"),
    _mutant(
        "the first sums are staged again",
        EPILOGUE,
        "      memcpy(sums[i - kStagedParts], sums[i], sizeof(sums[i]));",
        "      ;",
    ),
    _mutant(
        "rows beyond the edge are written", EPILOGUE, "row >= rows || count == 0", "count == 0"
    ),
    _mutant(
        "columns beyond the edge are whole",
        EPILOGUE,
        "left < kVector ? static_cast<int>(left) : kVector",
        "kVector",
    ),
    _mutant(
        "rows of no matrix are written",
        EPILOGUE,
        "g.batch == 0 ? 0 : g.m",
        "g.m",
        select="test_edges",
    ),
    _epilogue(
        "aux is stored behind the activation",
        EPILOGUE,
        "    if (g.aux.data) store_vector(g.aux, place, x);\n    activate(g.activation, x);\n",
        "    activate(g.activation, x);\n    if (g.aux.data) store_vector(g.aux, place, x);\n",
    ),
    _epilogue(
        "the first thread votes alone",
        EPILOGUE,
        "ptx::block_any(!finite) &&",
        "!finite &&",
        "found_inf",
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
        "  ptx::block_sync();  // the staged sums have been read\n",
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
    _epilogue(
        "squares over staged rows",
        EPILOGUE,
        "  ptx::block_sync();  // nobody reads the staged sums any more\n",
        "",
        "squares",
    ),
    _epilogue(
        "squares count splits",
        EPILOGUE,
        "tiles = plan.units / plan.splits;",
        "tiles = plan.units;",
        "squares",
    ),
    _epilogue(
        "squares of what is not rounded",
        VECTOR,
        "const double x = Element<T>::widen(rounded[i]);",
        "const double x = from[i];",
        "squares",
    ),
    _epilogue("one group too few", EPILOGUE, "i < kGroups; ++i)\n", "i + 1 < kGroups; ++i)\n"),
    _epilogue(
        "groups are read too early",
        EPILOGUE,
        "= sum;\n  ptx::block_sync();\n  for",
        "= sum;\n  for",
    ),
    _mutant(
        "column sums without a barrier, race",
        EPILOGUE,
        "  ptx::block_sync();\n  if (!is_last",
        "  if (!is_last",
        **SUMS_RACE,
    ),
    # ---- vectors of eight
    _mutant("tails are written whole", VECTOR, "place.count == kVector &&", "true &&"),
    _mutant("misaligned vectors", VECTOR, "&& reinterpret_cast<uintptr_t>(at) % 16 == 0", ""),
    _epilogue(
        "strided columns are taken for neighbours",
        VECTOR,
        "matrix.column_stride == 1 &&",
        "true &&",
    ),
    _mutant(
        "what does not exist is read",
        VECTOR,
        "i < place.count ? Element<T>::widen(at[i * matrix.column_stride]) : 0.0f",
        "Element<T>::widen(at[i * matrix.column_stride])",
        "gemm_kernels_epilogue",
        "test_bias",
        "asan",
    ),
    _epilogue(
        "only the last element is judged",
        VECTOR,
        "result.finite &=",
        "result.finite =",
        "found_inf",
    ),
    # ---- the rest
    _epilogue(
        "gelu's tail cancels",
        ACTIVATION,
        "0.5f * erfcf(x * -0.70710678f)",
        "1.0f - 0.5f * erfcf(x * 0.70710678f)",
    ),
    _epilogue(
        "NaN is bounded",
        ACTIVATION,
        ": at[i] < -16.0f ? -16.0f : at[i]",
        ": at[i] > -16.0f ? at[i] : -16.0f",
    ),
    _mutant(
        "strides of single lines are kept", LAUNCH, "  if (g.m <= 1) g.a.row_stride = 0;\n", ""
    ),
)
