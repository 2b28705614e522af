"""Mutants of the multi-tensor kernels, csrc/kernels/lists."""

from __future__ import annotations

from simt.mutants.mutant import Mutant

FOREACH, NORM, CHECK, UNSCALE, UPDATE, REDUCE, ELEMENT = (
    *("lists/foreach.cuh", "lists/grad_norm.cu", "lists/check_finite.cu", "lists/unscale.cu"),
    *("lists/update_scale.cu", "reduce.cuh", "element.cuh"),
)
CAST = "lists/cast.cu"
FIRST_CHUNK = "entries[middle].first_chunk <= chunk"
LAST_TICKET = "blocks - 1) == blocks - 1"
SHUFFLE = "for (int mask = 16; mask > 0; mask /= 2)"
ASK = "if (ptx::block_any(body.bad) && threadIdx.x == 0) "
STORE = f"{ASK}ptx::store_any(found_inf, 1.0f)"
SCALED = "E::widen(x) * static_cast<Compute>(inv_scale) *"
SKIP_ONE = "    if (body.changes_nothing()) return;\n"
BAD_NORM = "if (threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);\n      return;"
BLOCK_SUM_WAITS = "= value;\n  ptx::block_sync();"
RELEASE = "if (threadIdx.x == 0) {\n    ptx::device_fence();"
ACQUIRE = f"{LAST_TICKET};\n    ptx::device_fence();"
TICKET_WAITS = "  }\n  ptx::block_sync();"
SUMS_WAIT = "    ptx::block_sync();\n    for (int i = threadIdx.x / 32; i < count"
SUMS_ARE_READ = "    ptx::block_sync();\n    count = 0;"
RACE = {"select": "small_exact or found_inf", "variant": "tsan"}

EACH = "norm_of_each"
TINY = {"tests": "launch_economy", "select": "tiny and check"}
EVEN = {"tests": "launch_economy", "select": "no_multiple"}
TABLE = {"tests": "unscale", "select": "mixed and 2000"}
CLIPS = "(clip or norm) and not clips_any"

# The others take seconds, where these take milliseconds.
QUICK = {
    "unscale": "not clips_any",
    "grad_norm": "not repeatable",
}


def _mutant(
    name: str, file: str, old: str, new: str, tests: str, select: str = "", variant: str = "plain"
) -> Mutant:
    return Mutant(name, file, old, new, tests, select or QUICK.get(tests, ""), variant)


MUTANTS = (
    _mutant("owner of a first chunk", FOREACH, FIRST_CHUNK, f"{FIRST_CHUNK} + 1", "unscale"),
    _mutant(
        "the last chunks of a share",
        FOREACH,
        "(block < longer_blocks ? block : longer_blocks)",
        "0",
        "unscale",
    ),
    _mutant(
        "empty tensors are not passed",
        FOREACH,
        "while (i + 1 < table.size &&",
        "if (i + 1 < table.size &&",
        "unscale",
    ),
    _mutant("nothing is no span", FOREACH, "if (left > 0)\n", "", "unscale"),
    _mutant("chunks of two blocks", FOREACH, "next < share.end ? next : share.end", "next", **EVEN),
    _mutant(
        "a share from its chunk on",
        FOREACH,
        "piece - entry.first",
        "chunk * kChunkPieces - entry.first",
        "unscale",
    ),
    _mutant(
        "past the end of a tensor",
        FOREACH,
        "left < most ? static_cast<int>(left) : most",
        "most",
        "unscale",
    ),
    _mutant("no head", FOREACH, "head = elements_to_alignment(data)", "head = 0", "unscale"),
    _mutant(
        "a list too long for its table",
        FOREACH,
        "list.size <= InlineTable<Entry, bytes>::kCapacity",
        "list.size <= InlineTable<Entry, bytes>::kCapacity + 1",
        "launch_economy",
        "any_list and check",
    ),
    _mutant(
        "every table is large",
        FOREACH,
        "if (fits(small)) return launch_inline(small);",
        "if (fits(small)) return launch_inline(medium);",
        "launch_economy",
        "any_list and check",
    ),
    _mutant("no singles", FOREACH, "if (thread < singles)", "if (false)", "check_finite"),
    _mutant("no tail", FOREACH, "if (thread < singles)", "if (thread < head)", "check_finite"),
    _mutant("no element twice", FOREACH, "(thread < head ? 0 :", "(true ? 0 :", "unscale"),
    _mutant(
        "unrolled loop runs too far",
        FOREACH,
        "i + (kPacksInFlight - 1) * kForeachThreads < count",
        "i < count",
        "unscale",
    ),
    _mutant(
        "a pack too few", FOREACH, "for (; i < count; i", "for (; i < count - 1; i", "check_finite"
    ),
    _mutant("one pack for all", FOREACH, "load16(at + k *", "load16(at + 0 *", "unscale"),
    _mutant("all spans begin in one warp", FOREACH, "+ first_warp * 32", "+ 0", **TINY),
    _mutant(
        "neighbours share a warp",
        FOREACH,
        "reversed_bits(chunk)",
        "reversed_bits(chunk / 2)",
        **TINY,
    ),
    _mutant("turned by half a warp", FOREACH, "+ first_warp * 32", "+ first_warp * 16", **TINY),
    _mutant(
        "threads behind the last",
        FOREACH,
        "first_warp * 32) % kThreads",
        "first_warp * 32)",
        "unscale",
    ),
    _mutant("the warp's first probe", FOREACH, "chunk) - 1) * step", "chunk)) * step", **TABLE),
    _mutant(
        "a probe past the table's end",
        FOREACH,
        "warp_count(at < high && ",
        "warp_count(",
        "check_finite",
        "at_its_end",
        "asan",
    ),
    *(
        _mutant("the grid before may still run", file, "  begin_grid();\n", "", op)
        for file, op in (
            (UNSCALE, "unscale"),
            (CHECK, "check_finite"),
            (NORM, "grad_norm"),
            (CAST, "cast"),
            (UPDATE, "update_scale"),
        )
    ),
    _mutant("no barrier in block_sum", REDUCE, BLOCK_SUM_WAITS, "= value;", "grad_norm"),
    _mutant(
        "no barrier in block_sum, race", REDUCE, BLOCK_SUM_WAITS, "= value;", "grad_norm", **RACE
    ),
    _mutant("a shuffle too few", REDUCE, SHUFFLE, SHUFFLE.replace("16", "8"), "grad_norm"),
    _mutant("no barrier behind the ticket", REDUCE, TICKET_WAITS, "  }", "grad_norm"),
    _mutant(
        "the last block but one adds up",
        REDUCE,
        LAST_TICKET,
        "blocks - 1) + 2 == blocks",
        "grad_norm",
    ),
    _mutant(
        "no fence before the ticket",
        REDUCE,
        RELEASE,
        "if (threadIdx.x == 0) {",
        "grad_norm",
        **RACE,
    ),
    _mutant("no fence behind the ticket", REDUCE, ACQUIRE, f"{LAST_TICKET};", "grad_norm", **RACE),
    _mutant(
        "one partial sum too few", NORM, "i < gridDim.x; i", "i + 1 < gridDim.x; i", "grad_norm"
    ),
    _mutant("a sum that overflows", NORM, " && Element<float>::finite(squares)", "", "grad_norm"),
    _mutant(
        "a sum of few bits", NORM, "squares >= kLeastSum", "squares > 0", "grad_norm", "squares"
    ),
    _mutant("squares that are 0", NORM, "squares != 0 || ", "squares != 0 && ", "grad_norm"),
    _mutant("zeros times infinity", NORM, "squares != 0 || ", "", "grad_norm", "nothing_times"),
    _mutant("batches are not read again", NORM, "add_again<kPacks>(at);", ";", "grad_norm"),
    _mutant(
        "one pack of a batch again", NORM, "i / kSize * kForeachThreads * kSize +", "", "grad_norm"
    ),
    _mutant("half of the pairs", NORM, "half = kSize / 2", "half = kSize / 4", "grad_norm"),
    _mutant("one of each pair", NORM, "fmaf(a, a, b * b)", "a * a", "grad_norm"),
    _mutant(
        "sums of blocks share a slot",
        NORM,
        "[blockIdx.x + shared.tensors[i]]",
        "[shared.tensors[i]]",
        "grad_norm",
        EACH,
    ),
    _mutant(
        "a tensor too many in shared memory", NORM, "++count ==", "count++ ==", "grad_norm", EACH
    ),
    _mutant(
        "a warp's sum by some of its lanes",
        NORM,
        "if (ptx::warp_any(sum != 0))",
        "if (sum != 0)",
        "grad_norm",
        EACH,
    ),
    _mutant(
        "parts of tensors are not told apart",
        NORM,
        "if (next != tensor) leave()",
        "leave()",
        "grad_norm",
        EACH,
    ),
    _mutant("a tensor's sum stays", NORM, "    sum = 0;\n", "", "grad_norm", EACH),
    _mutant(
        "sums of warps are not waited for",
        NORM,
        SUMS_WAIT,
        SUMS_WAIT.partition("\n")[2],
        "grad_norm",
        EACH,
    ),
    _mutant(
        "sums of warps are not read yet",
        NORM,
        SUMS_ARE_READ,
        "    count = 0;",
        "grad_norm",
        EACH,
    ),
    _mutant(
        "the block of a tensor's last chunk",
        NORM,
        "shares.block_of(begin + (numel - 1) / kPieceElements)",
        "shares.block_of(begin)",
        "grad_norm",
        EACH,
    ),
    _mutant(
        "the owner of a chunk",
        FOREACH,
        "longer_blocks * (per_block + 1)",
        "longer_blocks * per_block",
        "grad_norm",
    ),
    _mutant(
        "plain stores of found_inf",
        UNSCALE,
        STORE,
        f"{ASK}*found_inf = 1.0f",
        "unscale",
        "random_bit_patterns and float32",
        "tsan",
    ),
    _mutant("only thread 0 is asked", UNSCALE, "ptx::block_any(body.bad)", "body.bad", "unscale"),
    _mutant(
        "the input is checked instead", UNSCALE, "!E::finite(product)", "!E::finite(x)", "unscale"
    ),
    _mutant(
        "found_inf decides",
        UNSCALE,
        "!Element<float>::finite(*norm)",
        "*found_inf",
        "unscale",
        CLIPS,
    ),
    _mutant("a bad norm is no overflow", UNSCALE, BAD_NORM, "return;", "unscale", CLIPS),
    _mutant(
        "a bad norm clips", UNSCALE, BAD_NORM, BAD_NORM.replace("return;", ""), "unscale", CLIPS
    ),
    _mutant("clipped, not unscaled", UNSCALE, SCALED, "E::widen(x) *", "unscale"),
    _mutant(
        "one factor",
        UNSCALE,
        "inv_scale == 1.0f && coefficient == 1.0f",
        "inv_scale == 1.0f",
        "unscale",
        CLIPS,
    ),
    _mutant("clipping by one reads", UNSCALE, SKIP_ONE, "", "unscale", CLIPS),
    _mutant(
        "an empty list has no norm",
        UNSCALE,
        "chunks == 0 && !args.norm",
        "chunks == 0",
        "unscale",
        CLIPS,
    ),
    _mutant(
        "no block for an empty list", UNSCALE, "std::max(blocks, 1)", "blocks", "unscale", CLIPS
    ),
    _mutant("the last element decides", CHECK, "bad |= !", "bad = !", "check_finite"),
    _mutant(
        "infinity is finite",
        ELEMENT,
        "& 0x7fffu) < 0x7c00u",
        "& 0x7fffu) <= 0x7c00u",
        "check_finite",
    ),
    _mutant("copies are rounded", CAST, "std::is_same_v<To, From>", "false", "cast", "patterns"),
    _mutant("never together", CAST, "together && head < n", "head < n", "cast_memory", "edge"),
    _mutant("a head too long", CAST, "together && head < n", "together", "cast_memory", "edge"),
    _mutant(
        "head by the wider side",
        CAST,
        "sizeof(To) < sizeof(From)",
        "sizeof(To) > sizeof(From)",
        "cast_memory",
        "each_pack",
    ),
    _mutant("no tail of a cast", CAST, "from + tail, n - tail", "from + tail, 0", "cast_memory"),
    _mutant(
        "one load for all", CAST, "load16(from + i * Pack<From>::kSize)", "load16(from)", "cast"
    ),
    _mutant("one store for all", CAST, "from[i * Pack<To>::kSize + j]", "from[j]", "cast"),
    _mutant("units in flight", CAST, "left >= Unit::kInFlight", "left > 0", "cast_memory", "edge"),
    _mutant("the last unit", CAST, "left > 0; --left", "left > 1; --left", "cast_memory"),
    _mutant("outputs lag", CAST, "to += Unit::kInFlight * kStride", "to += kStride", "cast_memory"),
    _mutant("outputs stay", CAST, "    to += kStride", "    to += 0", "cast_memory"),
    _mutant("a unit per thread too many", CAST, "count - thread +", "count +", "cast_memory"),
    _mutant("every chunk from the first", CAST, "from + span.offset", "from", "cast_memory"),
    _mutant("every second found_inf", UPDATE, "i += 32", "i += 64", "update_scale"),
    _mutant("lane 0 decides", UPDATE, "overflow = ptx::warp_any(overflow);", "", "update_scale"),
    _mutant("a norm of inf is no overflow", NORM, "::finite(*norm)", "::finite(0.0f)", "grad_norm"),
    _mutant("every lane updates", UPDATE, "if (threadIdx.x == 0) close", "close", "update_scale"),
)
