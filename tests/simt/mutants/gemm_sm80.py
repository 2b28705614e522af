"""Mutants of the products of the GEMM kernel for sm_80, csrc/kernels/gemm/sm80."""

from __future__ import annotations

from simt.build import FEW_TILES
from simt.mutants.mutant import Mutant

OPERAND, MAINLOOP, SCHEDULER, SPLIT, LAUNCH = (
    f"gemm/{name}"
    for name in (
        *("sm80/operand.cuh", "sm80/mainloop.cuh", "shared/scheduler.cuh", "sm80/split.cuh"),
        "gemm.cu",
    )
)
TAILS = "test_tails and (nn or tt)"
RESULTS = (
    f"{FEW_TILES} and ({TAILS} or every_schedule or batches_and_sums or same_in_every) "
    "or test_groups"
)
ASAN = {"select": f"{FEW_TILES} and {TAILS}", "variant": "asan"}
RACE = {
    "select": f"{FEW_TILES} and (test_tails and tt or every_schedule and [0-)",
    "variant": "tsan",
}
SPLIT_RACE = {"select": f"{FEW_TILES} and error_is_that_of_a_sum and 40-5", "variant": "tsan"}


def gemm_mutant(
    name: str,
    file: str,
    old: str,
    new: str,
    tests: str = "gemm_kernels",
    select: str = RESULTS,
    variant: str = "plain",
) -> Mutant:
    return Mutant(name, file, old, new, tests, select, variant)


STAGE_IS_FREE = "        ptx::cp_async_wait<kStages - 2>();\n        ptx::block_sync();\n"
FIRST_STEP = "  ptx::cp_async_wait<kStages - 2>();\n  ptx::block_sync();\n\n"
EMPTY_GROUP = "    }\n    ptx::cp_async_commit();\n"
ADD_IN_ORDER = (
    "  memset(sums, 0, sizeof(sums));\n  for (uint32_t split = 0; split < plan.splits; ++split) {\n"
)

WAIT_GRID = "  ptx::wait_for_previous_grid();\n"
FIRST_FETCHES = (
    "#pragma unroll\n  for (int stage = 0; stage < kStages - 1; ++stage) "
    "steps.fetch(stages[stage]);\n"
)

MUTANTS = (
    gemm_mutant("the grid before may still run", MAINLOOP, WAIT_GRID, ""),
    gemm_mutant(
        "operands are fetched before the grid before has ended",
        MAINLOOP,
        WAIT_GRID + FIRST_FETCHES,
        FIRST_FETCHES + WAIT_GRID,
    ),
    # ---- operands
    gemm_mutant("the swizzle's period is not 8 lines", OPERAND, "row % (8 / kRowLines)", "row % 8"),
    gemm_mutant(
        "parts of long lines overlap", OPERAND, "kRowChunks * kPartBytes +", "kRowChunks +"
    ),
    gemm_mutant(
        "halves of m and n change places",
        OPERAND,
        "matrix % 2 : matrix / 2;\n    const int k",
        "matrix / 2 : matrix % 2;\n    const int k",
    ),
    gemm_mutant(
        "halves of k change places",
        OPERAND,
        "matrix / 2 : matrix % 2;\n    offset_",
        "matrix % 2 : matrix / 2;\n    offset_",
    ),
    gemm_mutant("swizzled chunks are added up", OPERAND, "offset_ ^ chunks", "offset_ + chunks"),
    gemm_mutant("fragments of eight lines", OPERAND, "lines * 2 * Tile", "lines * Tile"),
    gemm_mutant(
        "rows beyond the edge are read",
        OPERAND,
        "(extent - first < kExtent ? extent - first : kExtent)",
        "(kExtent)",
        **ASAN,
    ),
    gemm_mutant(
        "lines beyond the edge are read",
        OPERAND,
        "i * kPassLines < lines ? elements : 0",
        "elements",
    ),
    gemm_mutant(
        "chunks are read whole",
        OPERAND,
        "length < kOperandChunk ? length : kOperandChunk;",
        "kOperandChunk;",
    ),
    gemm_mutant(
        "one step too far to the next matrix", OPERAND, "(steps - 1) * step", "steps * step"
    ),
    gemm_mutant("steps of one line", OPERAND, "kStep * line_stride_", "line_stride_"),
    gemm_mutant(
        "all matrices are the first", OPERAND, "matrix * matrix_stride_ +", "0 * matrix_stride_ +"
    ),
    # ---- main loop
    gemm_mutant(
        "refills before all have read", MAINLOOP, STAGE_IS_FREE, STAGE_IS_FREE.splitlines(True)[0]
    ),
    gemm_mutant(
        "refills before all have read, race",
        MAINLOOP,
        STAGE_IS_FREE,
        STAGE_IS_FREE.splitlines(True)[0],
        **RACE,
    ),
    gemm_mutant(
        "wait one group short", MAINLOOP, STAGE_IS_FREE, STAGE_IS_FREE.replace("- 2", "- 1")
    ),
    gemm_mutant(
        "first wait one group short", MAINLOOP, FIRST_STEP, FIRST_STEP.replace("- 2", "- 1")
    ),
    gemm_mutant(
        "no barrier before the first step, race",
        MAINLOOP,
        FIRST_STEP,
        FIRST_STEP.splitlines(True)[0],
        **RACE,
    ),
    gemm_mutant(
        "no empty groups behind the last step",
        MAINLOOP,
        EMPTY_GROUP,
        "      ptx::cp_async_commit();\n    }\n",
    ),
    gemm_mutant(
        "refills the stage that is read",
        MAINLOOP,
        "steps.fetch(stages[last])",
        "steps.fetch(stages[stage])",
    ),
    gemm_mutant(
        "refills a step early", MAINLOOP, "if (depth == 0) steps", "if (depth == kDepths - 1) steps"
    ),
    gemm_mutant(
        "staged while others read, race",
        MAINLOOP,
        "  }\n  ptx::block_sync();\n}",
        "  }\n}",
        **RACE,
    ),
    gemm_mutant(
        "the next matrix has no tail",
        MAINLOOP,
        "      k_left_ = k_;\n",
        "      k_left_ = kTile.k;\n",
    ),
    gemm_mutant(
        "the tail of k is not cut", MAINLOOP, "k_left_ < kTile.k ? k_left_ : kTile.k", "kTile.k"
    ),
    gemm_mutant(
        "fragments of the depth before",
        MAINLOOP,
        "fragments[depth % 2].multiply",
        "fragments[(depth + 1) % 2].multiply",
    ),
    # ---- scheduler
    gemm_mutant(
        "the last group is as tall as the others",
        SCHEDULER,
        "left < plan.group ? left : plan.group",
        "plan.group",
    ),
    gemm_mutant(
        "shares begin too late",
        SCHEDULER,
        "share < longer ? share : longer",
        "longer",
        "gemm_plan",
        "computes_each_step",
    ),
    gemm_mutant(
        "shares of a tile are those of a batch",
        SCHEDULER,
        "work.batch * plan.terms + term",
        "work.batch + term",
        "gemm_plan",
        "computes_each_step",
    ),
    gemm_mutant(
        "steps are not of their term", SCHEDULER, "begin - term * plan.term_steps", "begin"
    ),
    # ---- splits
    gemm_mutant(
        "shares lie over each other",
        SPLIT,
        "int64_t{work.tile} * plan.splits + split",
        "int64_t{work.tile} + split",
    ),
    gemm_mutant(
        "no barrier before the ticket",
        SPLIT,
        "  ptx::block_sync();\n  if (!is_last",
        "  if (!is_last",
        **SPLIT_RACE,
    ),
    gemm_mutant(
        "the last share is left out",
        SPLIT,
        "split < plan.splits; ++split",
        "split + 1 < plan.splits; ++split",
    ),
    gemm_mutant(
        "added up as they come",
        SPLIT,
        ADD_IN_ORDER,
        ADD_IN_ORDER.partition("\n")[2] + "    if (split == work.share) continue;\n",
    ),
    gemm_mutant("a share is added to itself", SPLIT, "  memset(sums, 0, sizeof(sums));\n", ""),
    gemm_mutant("all tiles have one ticket", SPLIT, "tickets + work.tile,", "tickets,"),
    # ---- the launcher
    gemm_mutant(
        "strides of single lines are kept",
        LAUNCH,
        "  if (g.n <= 1) g.b.column_stride = 0;\n",
        "",
        select="strides_of_single and False",
    ),
)
