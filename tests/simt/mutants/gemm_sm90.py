"""Mutants of the GEMM kernel for sm_90a, csrc/kernels/gemm/sm90.

And tests that need few instances of it alone.
"""

from __future__ import annotations

from simt.build import FEW_SM90_TILES as FEW
from simt.mutants.mutant import Mutant

MAINLOOP, SPLIT, PART, EPILOGUE, GEMM, SCHEDULER = (
    f"gemm/{name}.cuh"
    for name in (
        *("sm90/mainloop", "sm90/split", "sm90/part", "sm90/epilogue", "sm90/gemm"),
        "shared/scheduler",
    )
)
RING = f"{FEW} and every_schedule"
RESULTS = f"{FEW} and all_at_once"
SIDES = f"{FEW} and test_boxes"
SUMS = f"{FEW} and sums"
SHARES = f"{FEW} and shares_behind"
ELSEWHERE = f"{FEW} and elsewhere"
ASAN = {"select": f"{FEW} and all_at_once and fp32", "variant": "asan"}
RACE = {"select": f"{RESULTS} and fp16 and (none or derivative)", "variant": "tsan"}


def _mutant(
    name: str,
    file: str,
    old: str,
    new: str,
    select: str = RING,
    variant: str = "plain",
) -> Mutant:
    return Mutant(f"sm90: {name}", file, old, new, "gemm_sm90", select, variant)


def _layout(name: str, file: str, old: str, new: str, select: str) -> Mutant:
    return Mutant(f"sm90: {name}", file, old, new, "gemm_kernels", select)


def _epilogue(
    name: str, file: str, old: str, new: str, select: str = RESULTS, variant: str = "plain"
) -> Mutant:
    return Mutant(f"sm90: {name}", file, old, new, "gemm_kernels_epilogue", select, variant)


WAIT_EMPTY = "      ptx::mbarrier_wait(header.empty[ring.at], ring.parity ^ 1);\n      //"
RELEASE = "    if (step > 0) release(header.empty[ring.before(1, plan.stages)], cluster);\n"
WAIT_AND_RELEASE = "    ptx::wgmma_wait<1>();\n" + RELEASE
LAST_RELEASE = "  release(header.empty[ring.before(1, plan.stages)], cluster);\n}"
WAIT_TURN = "ptx::mbarrier_wait(header.turn[consumer], consumer == 0 ? turn ^ 1 : turn);"
STORE_BARRIER = "    consumer_sync(consumer_);\n    if (is_leader()) {\n      if (plan_.reduce)"
WAIT_STORES = "      else\n        ptx::bulk_wait_read<1>();\n"
NO_SIDE = "    if (!has_side() || !is_leader()) return;\n"
WAIT_SIDE = "    if (has_side()) ptx::mbarrier_wait("
TICKET = "  consumer_sync(consumer);\n  if (consumer_thread() == 0) {\n"
COLUMN_CONSUMERS = "g_.batch * tile_rows() * Gemm::kTeam);"

KEY = "TensorMapKey&) const = default;\n  size_t hash() const {\n    return hash_of(\n        {"
BASE = "reinterpret_cast<uintptr_t>(base), "
MAP, SIZES = "tensor_map.cuh", "sizes == o.sizes && box == o.box"


MUTANTS = (
    # ---- what is kept of tensor maps
    _mutant(
        "maps of other addresses",
        MAP,
        KEY + BASE,
        KEY.replace(
            "&) const = default;", "& o) const { return sizes == o.sizes && box == o.box; }"
        ),
        ELSEWHERE,
    ),
    # ---- the ring
    _mutant("phases do not change", MAINLOOP, "    parity ^= 1;\n", ""),
    _mutant("rounds are not skipped", MAINLOOP, "    parity ^= to / size & 1;\n", ""),
    _mutant("the other tile's steps are not skipped", GEMM, "ring.skip(steps,", "ring.skip(0,"),
    _mutant("the stage before the first one", MAINLOOP, "at - places + size :", "at :"),
    _mutant("stages are not waited for to be empty", MAINLOOP, WAIT_EMPTY, "      //"),
    _mutant(
        "waits for the other phase",
        MAINLOOP,
        WAIT_EMPTY,
        WAIT_EMPTY.replace("parity ^ 1", "parity"),
    ),
    _mutant(
        "steps are not waited for",
        MAINLOOP,
        "    ptx::mbarrier_wait(header.full[ring.at], ring.parity);\n",
        "",
    ),
    _mutant(
        "released before they are read",
        MAINLOOP,
        WAIT_AND_RELEASE,
        RELEASE + "    ptx::wgmma_wait<1>();\n",
    ),
    _mutant(
        "waits one product short",
        MAINLOOP,
        WAIT_AND_RELEASE,
        WAIT_AND_RELEASE.replace("<1>", "<2>"),
    ),
    _mutant("the last stage is not released", MAINLOOP, LAST_RELEASE, "}"),
    _mutant("released to one block", MAINLOOP, "(lane < cluster)", "(lane < 1)"),
    _mutant(
        "exits while others arrive",
        MAINLOOP,
        "  if (cluster > 1)\n    for (int i = 0; i < plan.stages;",
        "  if (cluster > 2)\n    for (int i = 0; i < plan.stages;",
    ),
    _mutant(
        "no bytes are expected",
        MAINLOOP,
        "mbarrier_arrive_expect_tx(full, Gemm::kTile.stage_bytes())",
        "mbarrier_arrive(full)",
    ),
    _mutant(
        "the block's own bytes are expected",
        MAINLOOP,
        "expect_tx(full, Gemm::kTile.stage_bytes())",
        "expect_tx(full, Gemm::kTile.stage_bytes() / cluster)",
    ),
    _mutant(
        "arrivals of one block",
        GEMM,
        "plan.cluster_m * plan.cluster_n * kWarps",
        "kWarps",
    ),
    _mutant("mbarriers are not fenced", GEMM, "  ptx::fence_mbarrier_init();\n", ""),
    _mutant("clusters do not meet", GEMM, "ptx::cluster_sync();", "ptx::block_sync();"),
    # ---- operands
    _mutant(
        "parts of a step are the same",
        MAINLOOP,
        "full, x + part * kAtom, y, z);",
        "full, x, y, z);",
    ),
    _mutant(
        "multicast parts are the same",
        MAINLOOP,
        "full, x + part * kAtom, y, z, 0b11);",
        "full, x, y, z, 0b11);",
    ),
    _mutant("multicast to one block", MAINLOOP, "y, z, 0b11)", "y, z, 0b01)"),
    _mutant("both halves are the first one", MAINLOOP, "is_lower ? kLines / 2 : 0", "0"),
    _mutant(
        "halves lie over each other", MAINLOOP, "    if (is_lower) to += kPartBytes / 2;\n", ""
    ),
    _mutant("halves are whole", GEMM, "Operand::kLines / shares", "Operand::kLines"),
    _mutant(
        "the wrong operand in halves",
        GEMM,
        "products, plan.cluster_n)",
        "products, plan.cluster_m)",
    ),
    _mutant("steps of 32 of k within rows", MAINLOOP, "kByK ? 32 :", "kByK ? 64 :"),
    _mutant("steps of 8 rows", MAINLOOP, ": 16 * kSwizzleRowBytes", ": 8 * kSwizzleRowBytes"),
    _mutant(
        "strides change places",
        MAINLOOP,
        "kPartBytes, kSwizzleAlignment)",
        "kSwizzleAlignment, kPartBytes)",
    ),
    _mutant(
        "parts are eight rows",
        MAINLOOP,
        "kPartBytes, kSwizzleAlignment)",
        "kSwizzleAlignment, kSwizzleAlignment)",
    ),
    _mutant("the lower rows are the upper ones", MAINLOOP, "block == 0 ? a : lower_a", "a"),
    _mutant(
        "consumers have the same rows",
        GEMM,
        "kTile.ping_pong ? 0 : consumer * kTile.consumer_m()",
        "0",
    ),
    _layout(
        "the next term is the first one",
        MAINLOOP,
        "        ++matrix;\n",
        "",
        f"{FEW} and batches_and_sums",
    ),
    _layout(
        "terms are not begun anew",
        MAINLOOP,
        "        step = 0;\n",
        "",
        f"{FEW} and batches_and_sums",
    ),
    _layout(
        "a shared operand has matrices",
        MAINLOOP,
        "g.a.batch_stride == 0 ? 0 : matrix",
        "matrix",
        f"{FEW} and shared_operands",
    ),
    # ---- products
    _mutant("the first step is added", MAINLOOP, "step == 0 && i == 0;", "false;"),
    _mutant("a step of 16 is all that is kept", MAINLOOP, "step == 0 && i == 0;", "step == 0;"),
    _mutant("accumulators are not fenced", MAINLOOP, "ptx::wgmma_fence(sums);", ";"),
    _mutant(
        "the last product is not waited for",
        MAINLOOP,
        "ptx::wgmma_wait<0>(sums);",
        "ptx::wgmma_wait<1>(sums);",
    ),
    # ---- units
    _mutant(
        "blocks are counted as clusters",
        MAINLOOP,
        "round * (plan.blocks / blocks)",
        "round * plan.blocks",
    ),
    _mutant("a cluster's tiles are the same", MAINLOOP, "+ (plan.cluster_n > 1 ? rank : 0)", "+ 0"),
    _mutant(
        "shares are of whole tiles",
        SCHEDULER,
        "plan.whole + shared / plan.splits",
        "shared / plan.splits",
        SHARES,
    ),
    _mutant(
        "whole tiles are shares",
        SCHEDULER,
        "is_whole ? 1 : plan.splits",
        "plan.splits",
        SHARES,
    ),
    _mutant("turns are not waited for", GEMM, WAIT_TURN, ";"),
    _mutant("turns are one's own", GEMM, "header.turn[consumer ^ 1]", "header.turn[consumer]"),
    _mutant("turns of every other phase", GEMM, "round / Sm90Tile::kConsumers % 2", "round % 2"),
    _mutant(
        "no registers are given back",
        GEMM,
        "      ptx::setmaxnreg_dec<Sm90Tile::kProducerRegisters>();\n",
        "",
    ),
    _mutant(
        "more registers than there are",
        GEMM,
        "setmaxnreg_inc<Sm90Tile::kConsumerRegisters>",
        "setmaxnreg_inc<Sm90Tile::kConsumerRegisters + 16>",
    ),
    # ---- shares
    _mutant(
        "the last share is left out",
        SPLIT,
        "split < count_; ++split",
        "split + 1 < count_; ++split",
        SHARES,
    ),
    _mutant(
        "shares of parts overlap",
        SPLIT,
        "number * (kSize / 4) * kWarpgroup",
        "number * kWarpgroup",
        SHARES,
    ),
    _mutant(
        "the blocks of a cluster share sums",
        SPLIT,
        "of_tile * cluster + rank",
        "of_tile * cluster",
        SHARES,
    ),
    _mutant("consumers share sums", SPLIT, "* Gemm::kTeam + member_", "* Gemm::kTeam", SHARES),
    _mutant("tiles share sums", SPLIT, "index(tile_ * count_ + split)", "index(split)", SHARES),
    _mutant("all tiles have one ticket", GEMM, "tickets + shares.number()", "tickets", SHARES),
    _mutant("a ticket before all have stored", SPLIT, TICKET, TICKET.partition("\n")[2], SHARES),
    _epilogue(
        "a ticket before all have stored, race", SPLIT, TICKET, TICKET.partition("\n")[2], **RACE
    ),
    # ---- boxes
    _mutant("the proxy is not fenced", EPILOGUE, "    ptx::fence_proxy_async();\n", ""),
    _epilogue(
        "boxes of 64 bytes have the other swizzle",
        GEMM,
        "CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B",
        "CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_128B",
        SIDES,
    ),
    _epilogue(
        "pairs are not swizzled",
        PART,
        "swizzled<kRowBytes>(row(i), byte / 16) + byte % 16",
        "row(i) * kRowBytes + byte",
        SIDES,
    ),
    _epilogue(
        "quarters change places",
        PART,
        "groups[i + j / 2].at + j % 2 * 2",
        "groups[i + j % 2].at + j / 2 * 2",
        SIDES,
    ),
    _mutant(
        "stored before all have written", EPILOGUE, STORE_BARRIER, STORE_BARRIER.partition("\n")[2]
    ),
    _epilogue(
        "boxes are not waited for to be read",
        EPILOGUE,
        WAIT_STORES,
        "      else\n        ;\n",
        SIDES,
    ),
    _epilogue(
        "waits one store short",
        EPILOGUE,
        WAIT_STORES,
        WAIT_STORES.replace("<1>", "<2>"),
        SIDES,
    ),
    _epilogue(
        "one of two boxes is not waited for",
        EPILOGUE,
        "stores_read() == 1)\n        ptx::bulk_wait_read<0>()",
        "stores_read() == 1)\n        ptx::bulk_wait_read<1>()",
        SIDES,
    ),
    _mutant("exits before boxes are read", GEMM, "  epilogue.close();\n", ""),
    _epilogue(
        "boxes are fetched over stores",
        EPILOGUE,
        NO_SIDE + "    ptx::bulk_wait_read<0>();\n",
        NO_SIDE,
        SIDES,
    ),
    _epilogue(
        "the box that is stored is fetched",
        EPILOGUE,
        "slots_.before(stores_read(), plan_.boxes)",
        "slots_.at",
        SIDES,
    ),
    _epilogue(
        "a box is fetched a part late",
        EPILOGUE,
        "number >= stores_read()",
        "number > stores_read()",
        SIDES,
    ),
    _epilogue(
        "the side is not waited for",
        EPILOGUE,
        WAIT_SIDE,
        "    if (false) ptx::mbarrier_wait(",
        SIDES,
    ),
    _epilogue(
        "the side's other phase",
        EPILOGUE,
        "[slots_.at], slots_.parity)",
        "[slots_.at], slots_.parity ^ 1)",
        SIDES,
    ),
    _epilogue("a share fetches the side", GEMM, "tile.inside && work.splits == 1", "tile.inside"),
    _epilogue(
        "the last share fetches no side",
        GEMM,
        "      epilogue.prefetch(tile.batch, row, tile.column);\n",
        "",
    ),
    _epilogue(
        "overwritten before other lanes have read, race",
        EPILOGUE,
        "      if (has_side()) ptx::warp_sync();",
        "     ",
        **RACE,
    ),
    _epilogue(
        "aux is out", EPILOGUE, "tma_store(maps_.side, to + box_bytes()", "tma_store(maps_.side, to"
    ),
    _epilogue(
        "stored, not added",
        EPILOGUE,
        "      if (plan_.reduce)\n",
        "      if (false)\n",
        f"{FEW} and memory_system",
    ),
    # ---- the numbers
    _epilogue(
        "bias beyond the edge",
        EPILOGUE,
        "at < left ? Element<T>::widen(from[at]) : 0.0f",
        "Element<T>::widen(from[at])",
        **ASAN,
    ),
    _epilogue(
        "bias of the upper rows", EPILOGUE, "        x.groups[i / 2].at[i % 2 + 2] += bias;\n", ""
    ),
    _epilogue("groups change places", PART, "groups[kGroups - 1] = group;", "groups[0] = group;"),
    _epilogue(
        "columns of one consumer, race",
        EPILOGUE,
        COLUMN_CONSUMERS,
        COLUMN_CONSUMERS.replace(" * Gemm::kTeam", ""),
        **RACE,  # the last one of all adds up once more
    ),
    _epilogue(
        "tiles outside are waited for",
        EPILOGUE,
        COLUMN_CONSUMERS,
        "g_.batch * plan_.tiles_m * plan_.cluster_m * Gemm::kTeam);",
        SUMS,
    ),
    _epilogue(
        "tiles outside are finished", MAINLOOP, "tile.row < g.m && tile.column < g.n", "true", SUMS
    ),
    _epilogue(
        "column sums of one buffer",
        EPILOGUE,
        "column + j * kColumns, number);",
        "column + j * kColumns, 0);",
        SUMS,
    ),
    _epilogue(
        "column sums of all matrices are the first one's",
        EPILOGUE,
        "int64_t{batch} * ((g_.m",
        "0 * ((g_.m",
        SUMS,
    ),
    _epilogue("a shuffle too few", EPILOGUE, "mask < 32; mask *= 2", "mask < 16; mask *= 2", SUMS),
)
