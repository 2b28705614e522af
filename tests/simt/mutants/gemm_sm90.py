"""Mutants of the GEMM kernel for sm_90a, csrc/kernels/gemm/sm90.

And tests that need few instances of it alone.
"""

from __future__ import annotations

from simt.build import FEW_SM90_TILES as FEW
from simt.mutants.mutant import Mutant

HEADER, MAINLOOP, BIAS, SPLIT, PART, EPILOGUE, GEMM = (
    f"gemm/sm90/{name}.cuh"
    for name in ("header", "mainloop", "bias", "split", "part", "epilogue", "gemm")
)
SCHEDULER = "gemm/shared/scheduler.cuh"
CHOOSE, COST = "gemm/plan/choose.h", "gemm/plan/cost.h"
RING = f"{FEW} and every_schedule"
NARROW_ROWS = "sm90-128x160 and every_schedule"
TURNS = f"{FEW} and way_through_the_ring"
RESULTS = f"{FEW} and all_at_once"
SIDES = f"{FEW} and test_boxes"
PLAIN = f"{SIDES} and plain"
SUMS = f"{FEW} and sums"
SHARES = f"{FEW} and shares_behind"
MOVED = f"{FEW} and moved_as_planned"
ORDER = f"{FEW} and added_in_one_order"
RANGES = f"{FEW} and ranges_behind"
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


def _plan(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(f"plan: {name}", file, old, new, "gemm_plan", "every_plan")


WAIT_EMPTY = "      ptx::mbarrier_wait(header.empty[ring.at], ring.parity ^ 1);\n      //"
RELEASE = "    if (step > 0) release(header.empty[ring.before(1, plan.stages)], cluster);\n"
WAIT_AND_RELEASE = "    ptx::wgmma_wait<1>();\n" + RELEASE
LAST_RELEASE = "  release(header.empty[ring.before(1, plan.stages)], cluster);\n}"
WAIT_TURN = "ptx::mbarrier_wait(header.turn[consumer], consumer == 0 ? turn ^ 1 : turn);"
WAIT_UNIT = "  ptx::mbarrier_wait(header.unit_full[at], lap % 2);\n"
WAIT_UNIT_READ = "  ptx::mbarrier_wait(header.unit_empty[at], lap % 2 ^ 1);\n"
NEXT_TURN = "ptx::mbarrier_arrive(header.turn[consumer ^ 1]);\n"
WAIT_BIAS = "    if (exists_) ptx::mbarrier_wait("
WAIT_BIAS_READ = "    ptx::mbarrier_wait(header.bias_empty[at], lap % 2 ^ 1);\n"
STORE_BARRIER = "    consumer_sync(consumer_);\n  }\n\n  // Applies the rare"
NO_SIDE = "    if (!has_side() || !is_leader()) return;\n"
WAIT_SIDE = "    if (has_side()) ptx::mbarrier_wait("
LOOK = "ptx::look(ticket()) == work_.shares - 1;"
LAST_TICKET = "    if (consumer_thread() == 0) ptx::ticket(ticket(), work_.shares - 1);\n"
SEEN = "    consumer_sync(consumer_);\n    if (!ptx::warp_uniform(header_.others_there"
FENCED = "    ptx::device_fence();\n  }\n\n  // Returns whether this share"
TICKET = "  consumer_sync(consumer);\n  if (consumer_thread() == 0) {\n"
BACKWARDS = """plan.splits, work.share);
  work.steps = share_begin(plan.steps - plan.rest, plan.splits, work.share + 1) - begin;
"""
COLUMN_CONSUMERS = "g_.batch * tile_rows() * Gemm::kTeam);"

WAIT_GRID = "    ptx::wait_for_previous_grid();\n"

KEY = "TensorMapKey&) const = default;\n  size_t hash() const {\n    return hash_of(\n        {"
BASE = "reinterpret_cast<uintptr_t>(base), "
MAP = "tensor_map.cuh"


MUTANTS = (
    _mutant("the grid before may still run", GEMM, WAIT_GRID, ""),
    _mutant(
        "producers do not wait for the grid before",
        GEMM,
        WAIT_GRID,
        f"    if (threadIdx.x >= kWarpgroup){WAIT_GRID[3:]}",
    ),
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
    _mutant("phases do not change", HEADER, "    parity ^= 1;\n", ""),
    _mutant(
        "all units begin at the first stage", MAINLOOP, "{work, tile, ring}", "{work, tile, {}}"
    ),
    _mutant("the stage before the first one", HEADER, "at - places + size :", "at :"),
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
        "plan.cluster_m * plan.cluster_n * kTeamWarps",
        "kTeamWarps",
    ),
    _mutant("mbarriers are not fenced", GEMM, "  ptx::fence_mbarrier_init();\n", ""),
    _mutant("clusters do not meet", GEMM, "ptx::cluster_sync();", "ptx::block_sync();"),
    # ---- operands
    _mutant(
        "parts of a step are the same",
        MAINLOOP,
        "full, x + part * kRow, y, z);",
        "full, x, y, z);",
    ),
    _mutant(
        "multicast parts are the same",
        MAINLOOP,
        "full, x + part * kRow, y, z, 0b11);",
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
    _mutant("steps of 8 rows", MAINLOOP, ": 16 * kRowBytes", ": 8 * kRowBytes"),
    _mutant(
        "strides change places",
        MAINLOOP,
        "kLeading, 8 * kRowBytes)",
        "8 * kRowBytes, kLeading)",
    ),
    _mutant(
        "parts are eight rows",
        MAINLOOP,
        "kByK ? 16 : kPartBytes",
        "kByK ? 16 : 8 * kRowBytes",
    ),
    _mutant("parts where there are none", MAINLOOP, "kByK ? 16 : kPartBytes", "kPartBytes"),
    _mutant(
        "rows of 64 bytes are swizzled as those of 128",
        MAINLOOP,
        "wgmma_descriptor<kRowBytes>",
        "wgmma_descriptor<2 * kAtom>",
        NARROW_ROWS,
    ),
    _mutant(
        "rows of 64 bytes are parts of 64",
        MAINLOOP,
        "part * kRow, y, z);",
        "part * kAtom, y, z);",
        NARROW_ROWS,
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
        "advance(at, plan, plan.blocks / (plan.cluster_m * plan.cluster_n));",
        "advance(at, plan, plan.blocks);",
    ),
    _mutant("a cluster's tiles are the same", MAINLOOP, "+ (plan.cluster_n > 1 ? rank : 0)", "+ 0"),
    _mutant(
        "shares are of whole tiles",
        SCHEDULER,
        "work.tile = plan.whole + tile;\n  work.share = (unit",
        "work.tile = tile;\n  work.share = (unit",
        SHARES,
    ),
    _mutant(
        "whole tiles are shares",
        SCHEDULER,
        "else if (at.unit >= plan.whole)",
        "else if (at.unit + 1 >= plan.whole)",
        SHARES,
    ),
    _mutant("units are not waited for", HEADER, WAIT_UNIT, ""),
    _epilogue("units are written over others", HEADER, WAIT_UNIT_READ, "", SIDES),
    _mutant(
        "laps of units have one phase",
        HEADER,
        "header.unit_full[at], lap % 2",
        "header.unit_full[at], 0",
    ),
    _mutant("there is no last unit", MAINLOOP, "  write_unit(header, round, {});\n", ""),
    _epilogue(
        "units are for consumers alone",
        GEMM,
        "kConsumerWarps + (g.bias.data ? 1 : 0)",
        "kConsumerWarps",
        PLAIN,
    ),
    _mutant("turns are not waited for", GEMM, WAIT_TURN, ";", TURNS),
    _mutant(
        "turns end before the steps",
        GEMM,
        "    accumulate<Gemm>(sums,",
        "    if (kTile.ping_pong && threadIdx.x % 32 == 0) "
        + NEXT_TURN
        + "    if (kTile.ping_pong)\n"
        "      accumulate<Gemm>(sums, header, stages, plan, first_row, work.steps, unit.stages,\n"
        "                       [] {});\n"
        "    else\n    accumulate<Gemm>(sums,",
        TURNS,
    ),
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
        "share < end; ++share",
        "share + 1 < end; ++share",
        SHARES,
    ),
    _mutant(
        "packs of a share overlap",
        SPLIT,
        "load_l2(from + i * kWarpgroup)",
        "load_l2(from + i)",
        SHARES,
    ),
    _mutant(
        "the blocks of a cluster share sums",
        SPLIT,
        "number * cluster + rank",
        "number * cluster",
        SHARES,
    ),
    _mutant("consumers share sums", SPLIT, "Gemm::kTeam > 1 ? consumer_ : 0", "0", SHARES),
    _mutant("tiles share sums", SPLIT, "index(work_.slot + share)", "index(share)", SHARES),
    _mutant(
        "all tiles have one ticket", SPLIT, "index(work_.tile - plan_.whole)", "index(0)", SHARES
    ),
    _mutant("one share too few is waited for", SPLIT, LOOK, LOOK.replace("- 1", "- 2"), SHARES),
    _mutant("all shares are stored", SPLIT, LOOK, LOOK.replace("- 1", "+ 0"), MOVED),
    _mutant("tickets are not taken", SPLIT, LAST_TICKET, "", SHARES),
    _mutant(
        "others are not seen by all",
        SPLIT,
        SEEN,
        SEEN.partition("\n")[2],
        SHARES,
    ),
    _mutant(
        "others' sums are not fenced, race",
        SPLIT,
        FENCED,
        FENCED.replace("    ptx::device_fence();\n", ""),
        f"{SHARES} and 128x128",
        "tsan",
    ),
    _mutant(
        "shares before are left out",
        SPLIT,
        "add<kBefore>(before, 0, work_.share,",
        "add<kBefore>(before, 0, 0,",
        SHARES,
    ),
    _mutant(
        "its own share is added twice",
        SPLIT,
        "work_.share + 1, work_.shares",
        "work_.share, work_.shares",
        SHARES,
    ),
    _mutant(
        "the last share comes first",
        SPLIT,
        "add<kBefore>(before, 0,",
        "add<kBefore>(row + first * 4, 0,",
        ORDER,
    ),
    _mutant(
        "a ticket before all have stored",
        SPLIT,
        TICKET,
        TICKET.partition("\n")[2],
        f"{FEW} and (shares_behind or ranges_behind or one_order)",
    ),
    _epilogue(
        "a ticket before all have stored, race", SPLIT, TICKET, TICKET.partition("\n")[2], **RACE
    ),
    # ---- ranges of steps
    _mutant(
        "a tile's second piece is left out",
        SCHEDULER,
        "      ++at.piece;\n      return;\n",
        "",
        RANGES,
    ),
    _mutant(
        "a piece of no steps",
        SCHEDULER,
        "* rests.of_tile < rests.begin",
        "* rests.of_tile <= rests.begin",
        RANGES,
    ),
    _mutant(
        "a piece begins with its tile",
        SCHEDULER,
        "static_cast<int>(from - first) : 0",
        "0 : 0",
        RANGES,
    ),
    _mutant(
        "a piece begins where the one before did",
        SCHEDULER,
        "at.piece == 0 ?",
        "at.piece < 2 ?",
        RANGES,
    ),
    _mutant(
        "pieces go on behind their tiles", SCHEDULER, "(to < behind ? to : behind)", "to", RANGES
    ),
    _mutant(
        "ranges begin at the first step",
        SCHEDULER,
        "return plan.steps - plan.rest + begin;",
        "return begin;",
        RANGES,
    ),
    _mutant(
        "the range before",
        SCHEDULER,
        "((step + 1) * ranges_ - 1) / steps_",
        "step * ranges_ / steps_",
        RANGES,
    ),
    _mutant(
        "all tiles have as many shares",
        SCHEDULER,
        "rests.last_range(tile) - first + 1",
        "1",
        RANGES,
    ),
    _mutant(
        "a share too many is waited for",
        SCHEDULER,
        "rests.last_range(tile) - first + 1",
        "rests.last_range(tile) - first + 2",
        RANGES,
    ),
    _mutant(
        "a range is an equal share",
        SCHEDULER,
        "plan.splits + range - rests",
        "range - rests",
        RANGES,
    ),
    _mutant(
        "ranges' shares are one tile's",
        SCHEDULER,
        "work.slot += tile + first;",
        "work.slot += first;",
        RANGES,
    ),
    _mutant(
        "shares of a range are one",
        SCHEDULER,
        "work.slot += tile + first;",
        "work.slot += tile;",
        RANGES,
    ),
    _plan(
        "equal shares are added backwards",
        SCHEDULER,
        BACKWARDS,
        BACKWARDS.replace("splits, work.share + 1", "splits, plan.splits - work.share").replace(
            "splits, work.share)", "splits, plan.splits - 1 - work.share)"
        ),
    ),
    _plan(
        "too little workspace for ranges",
        CHOOSE,
        "equal + plan.tail + plan.ranges",
        "equal + plan.ranges",
    ),
    _plan(
        "tickets of whole tiles",
        CHOOSE,
        "int64_t{plan.tail} * cluster",
        "int64_t{plan.ranges} * cluster",
    ),
    _plan(
        "what is left is not balanced",
        COST,
        "shared * ranges / (splits * tail + ranges)",
        "shared * ranges / (splits * tail)",
    ),
    _plan("equal shares are as long as ranges", COST, "steps - splits * lead", "steps"),
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
        "x.groups[i + j / 2].at + j % 2 * 2",
        "x.groups[i + j % 2].at + j / 2 * 2",
        SIDES,
    ),
    _mutant(
        "stored before all have written", EPILOGUE, STORE_BARRIER, STORE_BARRIER.partition("\n")[2]
    ),
    _epilogue(
        "one of two boxes is not waited for",
        EPILOGUE,
        "ptx::bulk_wait_read<0>();\n      else if",
        "ptx::bulk_wait_read<1>();\n      else if",
        SIDES,
    ),
    _epilogue(
        "one store is never waited for", EPILOGUE, "bulk_wait_read<1>", "bulk_wait_read<2>", SIDES
    ),
    _epilogue(
        "two stores are never waited for", EPILOGUE, "bulk_wait_read<2>", "bulk_wait_read<3>", SIDES
    ),
    _epilogue(
        "three stores are never waited for",
        EPILOGUE,
        "bulk_wait_read<3>",
        "bulk_wait_read<4>",
        PLAIN,
    ),
    _epilogue(
        "plain boxes are waited for one short",
        EPILOGUE,
        "plan_.boxes - 1);",
        "plan_.boxes);",
        PLAIN,
    ),
    _epilogue(
        "plain boxes are one",
        EPILOGUE,
        "slots_.at * kRows * kBoxColumns",
        "0 * kRows * kBoxColumns",
        PLAIN,
    ),
    _epilogue(
        "plain boxes lie half a box apart",
        EPILOGUE,
        "slots_.at * kRows * kBoxColumns",
        "slots_.at * kRows / 2 * kBoxColumns",
        PLAIN,
    ),
    _epilogue(
        "plain boxes change places",
        EPILOGUE,
        "&sums[i][j * kBoxColumns / 2]",
        "&sums[i][j * kBoxColumns / 4]",
        PLAIN,
    ),
    _epilogue(
        "alpha is left out",
        EPILOGUE,
        "        x.scale(alpha_);\n        if constexpr",
        "        if constexpr",
        PLAIN,
    ),
    _epilogue(
        "warps lie over each other",
        PART,
        "warp_row = thread / 32 * 16",
        "warp_row = thread / 32 * 8",
        PLAIN,
    ),
    _epilogue(
        "odd rows are in even rows' groups",
        PART,
        "group_offset(is_odd_ ? 2 : 0)",
        "group_offset(0)",
        PLAIN,
    ),
    _epilogue(
        "odd rows are even rows", PART, "is_odd_ ? other.at[j] : own.at[j]", "own.at[j]", PLAIN
    ),
    Mutant(
        "sm90: plain boxes are as narrow as others",
        "gemm/plan/tiles.h",
        "plain && n % whole == 0 ? whole :",
        "false ? whole :",
        "gemm_plan",
        "every_plan",
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
    _epilogue("a share fetches the side", GEMM, "tile.inside && work.shares == 1", "tile.inside"),
    _epilogue(
        "the last share fetches no side",
        GEMM,
        "      epilogue.prefetch(tile);\n",
        "",
    ),
    _epilogue(
        "overwritten before other lanes have read, race",
        EPILOGUE,
        "    if (has_side()) ptx::warp_sync();",
        "   ",
        **RACE,
    ),
    _epilogue(
        "aux is out", EPILOGUE, "tma_store(maps_.side, to + box_bytes()", "tma_store(maps_.side, to"
    ),
    _epilogue(
        "stored, not added",
        EPILOGUE,
        "sizeof(T) == 4 && plan_.reduce",
        "false",
        f"{FEW} and memory_system",
    ),
    # ---- the numbers
    _epilogue(
        "bias beyond the edge",
        BIAS,
        "column < g.n ? Element<T>::widen(from[column]) : 0.0f",
        "Element<T>::widen(from[column])",
        **ASAN,
    ),
    _epilogue(
        "bias of the upper rows", PART, "j < Group::kSize; ++j)", "j < Group::kSize / 2; ++j)"
    ),
    _epilogue("bias of the first tile", BIAS, "unit.tile.column + i * kWarp", "i * kWarp", PLAIN),
    _epilogue("bias of the other tile", BIAS, "header_.bias[at_]", "header_.bias[at_ ^ 1]", PLAIN),
    _epilogue(
        "bias is not waited for", BIAS, WAIT_BIAS, "    if (false) ptx::mbarrier_wait(", PLAIN
    ),
    _epilogue("bias is written over another", BIAS, WAIT_BIAS_READ, "", PLAIN),
    _mutant(
        "a unit may be overwritten once one lane has read it",
        HEADER,
        "  ptx::warp_sync();\n",
        "",
        f"{FEW} and every_schedule",
        "tsan",
    ),
    _epilogue(
        "bias is told of half written",
        BIAS,
        "    ptx::warp_sync();\n    if (lane == 0)",
        "    if (lane == 0)",
        PLAIN,
    ),
    _epilogue(
        "bias of a box is the first one's", EPILOGUE, "bias + j * kBoxColumns", "bias", PLAIN
    ),
    _epilogue(
        "bias is never read",
        BIAS,
        "ptx::mbarrier_arrive(header_.bias_empty[at_])",
        "(void)0",
        PLAIN,
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
        "j * kColumns, number);",
        "j * kColumns, 0);",
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
