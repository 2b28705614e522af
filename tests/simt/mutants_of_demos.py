"""Mutants of the demonstration kernels, tests/simt/kernels."""

from __future__ import annotations

from simt.mutant import Mutant

SUM, SM80, SM90 = "block_sum", "gemm_sm80", "gemm_sm90"


def _mutant(name: str, kernel: str, old: str, new: str, variant: str = "plain") -> Mutant:
    select = f"{kernel} and not sanitizer and not 50_ms"
    if kernel == SM80 and variant != "plain":
        select += " and float16 and (127x128x32 or 129x131x248)"
    return Mutant(name, f"{kernel}.cu", old, new, "simt_kernels", select, variant)


# The ends of the loops over k, with what follows them.
EMPTY_GROUP = (
    "    }\n    // A group for every step, an empty one behind the last, so that the count below "
    "stays right.\n    ptx::cp_async_commit();\n"
)
RELEASE_PREVIOUS = "    if (step > 0) release<kCluster>(shared.empty[at.previous_stage()]);\n"
LAST_WAIT = (
    "  }\n  // The last step's are done too, and the sums can be read.\n"
    "  ptx::wgmma_wait<0>(sums);\n"
)
RELEASE_LAST = "  release<kCluster>(shared.empty[at.previous_stage()]);\n"
DRAIN = (
    "    for (int i = 0; i < kStages; ++i, at.advance())\n"
    "      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);\n"
)

MUTANTS = (
    _mutant("no barrier", SUM, "  ptx::block_sync();\n", ""),
    _mutant("no barrier, race", SUM, "  ptx::block_sync();\n", "", "tsan"),
    _mutant("a shuffle too few", SUM, "mask = 16;", "mask = 8;"),
    _mutant(
        "head is not counted", SUM, "(columns - head) / Floats::kSize", "columns / Floats::kSize"
    ),
    _mutant("the wrong boundary", SUM, "% 16 / sizeof(float)", "% 8 / sizeof(float)"),
    _mutant(
        "head longer than the row",
        SUM,
        "columns < to_boundary ? columns : to_boundary",
        "to_boundary",
    ),
    _mutant("tail one short", SUM, "tail + thread < columns", "tail + thread + 1 < columns"),
    _mutant("no barrier before the stage is refilled", SM80, "    ptx::block_sync();\n", ""),
    _mutant("no barrier, race", SM80, "    ptx::block_sync();\n", "", "tsan"),
    _mutant(
        "wait one group short", SM80, "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>"
    ),
    _mutant(
        "no empty groups behind the last step",
        SM80,
        EMPTY_GROUP,
        "      ptx::cp_async_commit();\n    }\n",
    ),
    _mutant(
        "refills the stage that is read",
        SM80,
        "fetch_step(step + kStages - 1);",
        "fetch_step(step + kStages);",
    ),
    _mutant(
        "swizzle by the wrong row", SM80, "swizzled(row / 2, row % 2", "swizzled(row / 4, row % 2"
    ),
    _mutant(
        "rows beyond the edge are read",
        SM80,
        "from.first + row < from.rows && column",
        "column",
        "asan",
    ),
    _mutant(
        "columns beyond the edge are read",
        SM80,
        "< from.rows && column < from.columns",
        "< from.rows",
    ),
    _mutant("no zero fill", SM80, "inside ? 16 : 0);", "16);"),
    _mutant("tail predicate of rows", SM80, "if (row < m && column < n)", "if (column < n)"),
    _mutant(
        "no empty wait",
        SM90,
        "      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);\n      // Of all",
        "      // Of all",
    ),
    _mutant(
        "empty wait of the wrong phase",
        SM90,
        "ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);\n      // Of all",
        "ptx::mbarrier_wait(shared.empty[at.stage], at.parity);\n      // Of all",
    ),
    _mutant(
        "no full wait", SM90, "    ptx::mbarrier_wait(shared.full[at.stage], at.parity);\n", ""
    ),
    _mutant(
        "full wait of the wrong phase",
        SM90,
        "ptx::mbarrier_wait(shared.full[at.stage], at.parity);",
        "ptx::mbarrier_wait(shared.full[at.stage], at.parity ^ 1);",
    ),
    _mutant("the phase never changes", SM90, "    parity ^= 1;\n", ""),
    _mutant(
        "early release of this stage, late of none",
        SM90,
        RELEASE_PREVIOUS + LAST_WAIT + RELEASE_LAST,
        "    release<kCluster>(shared.empty[at.stage]);\n" + LAST_WAIT,
    ),
    _mutant("no wait before the release", SM90, "    ptx::wgmma_wait<1>();\n", ""),
    _mutant(
        "the last stage of a tile is not released",
        SM90,
        "  ptx::wgmma_wait<0>(sums);\n  release<kCluster>(shared.empty[at.previous_stage()]);\n",
        "  ptx::wgmma_wait<0>(sums);\n",
    ),
    _mutant("the other block is not told", SM90, "if (lane < kCluster) ptx", "if (lane < 1) ptx"),
    _mutant("one warp's arrival is enough", SM90, "kConsumers * kWarpgroup / 32);", "kConsumers);"),
    _mutant(
        "half of the expected bytes",
        SM90,
        "kStageBytes = 4 * sizeof(Box<T>)",
        "kStageBytes = 2 * sizeof(Box<T>)",
    ),
    _mutant(
        "no barrier behind the initialisation",
        SM90,
        "      ptx::cluster_sync();\n    else\n      ptx::block_sync();\n",
        "      ptx::warp_sync();\n    else\n      ptx::warp_sync();\n",
    ),
    _mutant(
        "barrier of the block alone behind the initialisation",
        SM90,
        "      ptx::cluster_sync();\n",
        "      ptx::block_sync();\n",
    ),
    _mutant("no fence behind the initialisation", SM90, "  ptx::fence_mbarrier_init();\n", ""),
    _mutant(
        "no drain",
        SM90,
        DRAIN,
        "    ;\n",
    ),
    _mutant("multicast to all but this block", SM90, "(1 << kBlocks) - 1", "(1 << kBlocks) - 2"),
    _mutant(
        "wrong stride (SBO)",
        SM90,
        "sizeof(Box<T>), kSwizzleAlignment)",
        "sizeof(Box<T>), kSwizzleAlignment / 2)",
    ),
    _mutant(
        "wrong leading (LBO)",
        SM90,
        "sizeof(Box<T>), kSwizzleAlignment)",
        "sizeof(Box<T>) / 2, kSwizzleAlignment)",
    ),
    _mutant(
        "wrong advance of k-major",
        SM90,
        "(kMajor == Major::k ? 2 : kSwizzleRowBytes)",
        "(kMajor == Major::k ? 4 : kSwizzleRowBytes)",
    ),
    _mutant("wrong advance of mn-major", SM90, "(kMajor == Major::k ? 2 : kSwizzleRowBytes)", "2"),
    _mutant("no fence before wgmma", SM90, "    ptx::wgmma_fence(sums);\n", ""),
    _mutant("no final wait", SM90, "  ptx::wgmma_wait<0>(sums);\n", ""),
    _mutant("each tile adds to the last one", SM90, "step + i > 0)", "true)"),
    _mutant(
        "rows of the other consumer",
        SM90,
        "&shared.a[at.stage][consumer]",
        "&shared.a[at.stage][0]",
    ),
    _mutant(
        "no wait before the boxes are used again",
        SM90,
        "  if (thread == 0) ptx::bulk_wait_read<0>();\n",
        "",
    ),
    _mutant(
        "no barrier behind that wait",
        SM90,
        "ptx::bulk_wait_read<0>();\n  consumer_sync(consumer);\n",
        "ptx::bulk_wait_read<0>();\n",
    ),
    _mutant("no proxy fence", SM90, "  ptx::fence_proxy_async();\n", ""),
    _mutant(
        "the proxy fence by one thread",
        SM90,
        "  ptx::fence_proxy_async();\n",
        "  if (thread == 0) ptx::fence_proxy_async();\n",
    ),
    _mutant(
        "no barrier before the store",
        SM90,
        "  // All have written.\n  consumer_sync(consumer);\n",
        "",
    ),
    _mutant(
        "one named barrier for both consumers",
        SM90,
        "ptx::barrier_sync<2, kWarpgroup>",
        "ptx::barrier_sync<1, kWarpgroup>",
    ),
    _mutant(
        "exits before the last store has read",
        SM90,
        "  if (threadIdx.x % kWarpgroup == 0) ptx::bulk_wait_read<0>();\n",
        "",
    ),
    _mutant(
        "wrong chunk of stmatrix",
        SM90,
        "i % 4 * 2 + thread % 32 / 16",
        "i % 4 * 2 + thread % 16 / 8",
    ),
    _mutant(
        "refills before the barrier",
        SM80,
        "    ptx::block_sync();\n    fetch_step(step + kStages - 1);\n",
        "    fetch_step(step + kStages - 1);\n    ptx::block_sync();\n",
    ),
    _mutant("two groups may be pending", SM90, "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();"),
    _mutant(
        "the last release before the last wait",
        SM90,
        "  ptx::wgmma_wait<0>(sums);\n  release<kCluster>(shared.empty[at.previous_stage()]);\n",
        "  release<kCluster>(shared.empty[at.previous_stage()]);\n  ptx::wgmma_wait<0>(sums);\n",
    ),
    _mutant(
        "more registers than are given back",
        SM90,
        "kProducerRegisters = 40, kConsumerRegisters = 232;\nstatic_assert(kProd",
        "kProducerRegisters = 48, kConsumerRegisters = 232;\nstatic_assert(true || kProd",
    ),
    _mutant(
        "the producer keeps its registers",
        SM90,
        "      ptx::setmaxnreg_dec<kProducerRegisters>();\n",
        "",
    ),
)
