"""Mutants of the multi-tensor kernels, csrc/kernels."""

from __future__ import annotations

from simt.mutant import Mutant

FOREACH, NORM, CHECK, UNSCALE, UPDATE, REDUCE, PACK = (
    *("foreach.cuh", "grad_norm.cu", "check_finite.cu", "unscale.cu", "update_scale.cu"),
    *("reduce.cuh", "pack.cuh"),
)
CAST = "cast.cu"
FIRST_CHUNK = "entries[middle].first_chunk <= chunk"
LAST_TICKET = "gridDim.x - 1) == gridDim.x - 1"
SHUFFLE = (  # the first of the two: it ends in a store
    "for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);\n"
    "  if (threadIdx.x % 32"
)
STORE = "ptx::store_any(found_inf, 1.0f)"
RELEASE = "= partial;\n    ptx::device_fence();"
ACQUIRE = f"{LAST_TICKET};\n    ptx::device_fence();"
RACE = {"select": "small_exact or found_inf", "variant": "tsan"}

MUTANTS = (
    Mutant("owner of a first chunk", FOREACH, FIRST_CHUNK, f"{FIRST_CHUNK} + 1", "unscale"),
    Mutant(
        "the last chunks of a share",
        FOREACH,
        "begin + share + (blockIdx.x < rest)",
        "begin + share",
        "unscale",
    ),
    Mutant(
        "empty tensors are not passed",
        FOREACH,
        "while (i + 1 < table.size &&",
        "if (i + 1 < table.size &&",
        "unscale",
    ),
    Mutant(
        "past the end of a tensor",
        FOREACH,
        "left < kChunkElements ? left : kChunkElements",
        "kChunkElements",
        "unscale",
    ),
    Mutant("no head", FOREACH, "misaligned ? (n <", "false ? (n <", "unscale"),
    Mutant(
        "head of a short tensor",
        FOREACH,
        "(n < kPack - misaligned ? n : kPack - misaligned)",
        "(kPack - misaligned)",
        "unscale",
    ),
    Mutant("no tail", FOREACH, "if (tail + thread < n)", "if (false)", "check_finite"),
    Mutant(
        "unrolled loop runs too far",
        FOREACH,
        "i + (kPacksInFlight - 1) * kForeachThreads < packs",
        "i < packs",
        "unscale",
    ),
    Mutant(
        "a pack too few", FOREACH, "for (; i < packs; i", "for (; i < packs - 1; i", "check_finite"
    ),
    Mutant("no barrier in block_sum", REDUCE, "  ptx::block_sync();\n", "", "grad_norm"),
    Mutant(
        "no barrier in block_sum, race", REDUCE, "  ptx::block_sync();\n", "", "grad_norm", **RACE
    ),
    Mutant("a shuffle too few", REDUCE, SHUFFLE, SHUFFLE.replace("16", "8", 1), "grad_norm"),
    Mutant("no barrier behind the ticket", NORM, "  ptx::block_sync();\n", "", "grad_norm"),
    Mutant(
        "the last block but one adds up",
        NORM,
        LAST_TICKET,
        "gridDim.x - 1) + 2 == gridDim.x",
        "grad_norm",
    ),
    Mutant(
        "one partial sum too few", NORM, "i < gridDim.x; i", "i + 1 < gridDim.x; i", "grad_norm"
    ),
    Mutant("no fence before the ticket", NORM, RELEASE, "= partial;", "grad_norm", **RACE),
    Mutant("no fence behind the ticket", NORM, ACQUIRE, f"{LAST_TICKET};", "grad_norm", **RACE),
    Mutant(
        "plain stores of found_inf",
        UNSCALE,
        STORE,
        "*found_inf = 1.0f",
        "unscale",
        "random_bit_patterns and float32",
        "tsan",
    ),
    Mutant("only thread 0 is asked", UNSCALE, "ptx::block_any(body.bad)", "body.bad", "unscale"),
    Mutant("the product is not judged", UNSCALE, "!E::finite(product)", "!E::finite(x)", "unscale"),
    Mutant("the last element decides", CHECK, "bad |= !", "bad = !", "check_finite"),
    Mutant(
        "index of the last tensor",
        CHECK,
        "if (bad) bad_tensor = tensor",
        "bad_tensor = bad ? tensor : -1",
        "check_finite",
    ),
    Mutant(
        "infinity is finite", PACK, "& 0x7fffu) < 0x7c00u", "& 0x7fffu) <= 0x7c00u", "check_finite"
    ),
    Mutant("copies are rounded", CAST, "std::is_same_v<To, From>", "false", "cast", "patterns"),
    Mutant("never together", CAST, "together && head < n", "head < n", "cast_memory", "edge"),
    Mutant("a head too long", CAST, "together && head < n", "together", "cast_memory", "edge"),
    Mutant(
        "head by the wider side",
        CAST,
        "sizeof(To) < sizeof(From)",
        "sizeof(To) > sizeof(From)",
        "cast_memory",
        "each_pack",
    ),
    Mutant("no tail of a cast", CAST, "from + tail, n - tail", "from + tail, 0", "cast_memory"),
    Mutant(
        "one load for all", CAST, "load16(from + i * Pack<From>::kSize)", "load16(from)", "cast"
    ),
    Mutant("one store for all", CAST, "from[i * Pack<To>::kSize + j]", "from[j]", "cast"),
    Mutant("units in flight", CAST, "left >= Unit::kInFlight", "left > 0", "cast_memory", "edge"),
    Mutant("the last unit", CAST, "left > 0; --left", "left > 1; --left", "cast_memory"),
    Mutant("outputs lag", CAST, "to += Unit::kInFlight * kStride", "to += kStride", "cast_memory"),
    Mutant("outputs stay", CAST, "    to += kStride", "    to += 0", "cast_memory"),
    Mutant("a unit per thread too many", CAST, "count - thread +", "count +", "cast_memory"),
    Mutant("every chunk from the first", CAST, "from + offset, n", "from, n", "cast_memory"),
    Mutant("every second found_inf", UPDATE, "i += 32", "i += 64", "update_scale"),
    Mutant("lane 0 decides", UPDATE, "overflow = ptx::warp_any(overflow);", "", "update_scale"),
)
