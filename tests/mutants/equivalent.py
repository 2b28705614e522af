"""List the mutants with the same behaviour as their kernel, each with its reason."""

from __future__ import annotations

from cudasim.mutants import Equivalent

ANY_ORDER = r"^(ld|mov)\."
LISTS = r"(unscale|check_finite|grad_norm|cast)_kernel"
UPDATES = r"(adam|sgd)_kernel"

EQUIVALENTS: tuple[Equivalent, ...] = (
    # Values that are only compared.
    Equivalent(
        "check_finite_kernel",
        "",
        "swap",
        ANY_ORDER,
        "the kernel looks for one bad element, in any order",
    ),
    Equivalent(
        "unscale_kernel",
        "return bad |= !E::finite(x), x;",
        "swap",
        ANY_ORDER,
        "a factor of 1 changes nothing; the kernel looks for one bad element, in any order",
    ),
    Equivalent(
        "unscale_kernel",
        "",
        "swap",
        r"ld\.global\.v2\.u64 .*\[%rd\d+\+-16384\]",
        "the loop over fp64 with a factor of 1 looks for one bad element, in any order",
    ),
    Equivalent(
        "grad_norm_kernel",
        "",
        "swap",
        ANY_ORDER,
        "the sum has the same terms; its rounding is within the tolerance",
    ),
    Equivalent(
        "check_finite_kernel",
        "const int singles = span.n - count * kPack;",
        "immediate",
        "and",
        "the kernel looks at some elements twice",
    ),
    Equivalent(
        "check_finite_kernel",
        "% 16 / sizeof(T)",
        "immediate",
        r"and\.b64",
        "the alignment of elements makes the removed bits of the address 0",
    ),
    Equivalent(
        "unscale_kernel",
        "return bad |= !E::finite(x), x;",
        "immediate",
        r"and\.b32.*, -\d+ ->",
        "a factor of 1 changes nothing; the kernel looks at some elements twice",
    ),
    Equivalent(
        "check_finite_kernel",
        "for (T& value : values.at) value = f(value);",
        "immediate",
        r"and\.b32.*, 512 -> .*, 0",
        "the kernel looks at some elements twice",
    ),
    # Alignment.
    Equivalent(
        "gemm_kernel",
        "reinterpret_cast<uintptr_t>(at) % 16 == 0",
        "immediate",
        r"and\.b64.* 15 -> .* 14",
        "the address of an element of two bytes or more is even",
    ),
    Equivalent(
        r"gemm_kernel<\w+, 8,",
        "ptx::cp_async_wait<kStages - 2>();",
        "",
        r"cp\.async\.wait_group 0 -> .*",
        "this tile, of two stages and for operands of any alignment, copies nothing asynchronously",
    ),
    Equivalent(
        r"gemm_kernel<\w+, 8,",
        "ptx::cp_async_commit();",
        "drop",
        r"cp\.async\.commit_group",
        "this tile, of two stages and for operands of any alignment, copies nothing asynchronously",
    ),
    Equivalent(
        "cast_kernel",
        "? elements_to_alignment(to) : elements_to_alignment(from);",
        "immediate",
        r"and\.b64",
        "behind another head no side is aligned, and elements are cast one by one",
    ),
    Equivalent(
        "cast_kernel",
        "elements_to_alignment(to + head) == 0 && elements_to_alignment(from + head) == 0;",
        "immediate",
        r"and\.b64.* 14 -> .* 12",
        "the narrower side, which the head aligns, is not misaligned here",
    ),
    # The search for the tensor of a block's first chunk.
    Equivalent(
        r"\w+_kernel",
        "while (high - low > 1) {",
        "",
        r"setp|sub\.s32|^@",
        "the walk goes on from an earlier tensor to the right one",
    ),
    Equivalent(
        r"\w+_kernel",
        "if (begin < end) first = owner_of(",
        "negate",
        r"setp|^@",
        "the walk begins at the first tensor of the list, and goes on to the right one",
    ),
    Equivalent(
        LISTS,
        "longer_blocks(chunks * kChunkPieces - per_block * gridDim.x)",
        "swap",
        r"sub\.s32",
        "two blocks share the pieces evenly; the updates have four blocks and the same lines",
    ),
    # Values of every call.
    Equivalent(
        r"gemm_sm90_kernel<\w+, 2,",
        "if (stores == 1)",
        "negate",
        r"setp|^@",
        "this tile has four boxes: a wait for all stores is stronger than one for all but two",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "if (i >= rows || j >= columns) continue;",
        "negate",
        r"or\.pred",
        "TMA stores nothing of a box beyond the matrix",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "const int order = row / (kSwizzleRowBytes / kRowBytes) % kChunks;",
        "immediate",
        r"268435448 -> .* 268435440",
        "the row is one of the first eight of a warp's sixteen",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "meet(leads, plan_.boxes - 1);",
        "negate",
        r"setp\.eq\.s32 .*, 2 ->",
        "a plain result has two or four boxes: a wait for all stores but one is the stronger one",
    ),
    Equivalent(
        r"gemm_sm90_kernel<\w+, 5,",
        "ptx::bulk_wait_read<1>();",
        "drop",
        "",
        "a tile has a box for each of its parts; the next tile waits for all stores",
    ),
    Equivalent(
        r"gemm_sm90_kernel<\w+, 5,",
        "else if (stores == 2)\nmeet(is_leader(), stores_read());",
        "negate",
        "",
        "a tile has a box for each of its parts; the next tile waits for all stores",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "if (is_leader()) ptx::bulk_wait_read<0>();",
        "immediate",
        r"and\.b32.* 127 -> .* 126",
        "the other thread has no stores to wait for",
    ),
    Equivalent(
        r"gemm_sm90_kernel<\w+, 5,",
        "if (adds_c() && is_leader() && number >= stores_read())",
        "negate",
        "setp",
        "a tile has a box for each of its parts: there is no more to load",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "ptx::mbarrier_arrive_expect_tx(full, Gemm::kTile.stage_bytes());",
        "weaken",
        "",
        "the producer has written nothing that it could release: TMA writes the stage",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "if (lane == 0) ptx::mbarrier_arrive(header.bias_full[at]);",
        "negate",
        "",
        "the executor cannot tell: 31 phases end at once, and leave the parity of one",
    ),
    Equivalent(
        r"gemm_sm90_kernel<\w+, 5,",
        "if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(header_.bias_empty[at_]);",
        "negate",
        "^@",
        "the executor cannot tell: meet() orders the reads, and the phases end at once",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "ptx::warp_sync();\n}",  # of ~StagedBias()
        "drop",
        "",
        "meet() orders the reads of the bias, all of which come before it",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "return i / kGroupSize * kGroupColumns + consumer_thread() % 4 * 2 + i % 2;",
        "immediate",
        r"and\.b32.* -128 -> .* -256",
        "the remainder of 4 is the same",
    ),
    Equivalent(
        "gemm_sm90_kernel",
        "const int place = swizzled<kColumns * kBytes>(row(i), byte / 16) + byte % 16;",
        "immediate",
        r"and\.b32.* -16 -> .* 1$",
        "the bytes of the first columns are below 16, and even: both give 0",
    ),
    # The store of found_inf.
    Equivalent(
        "unscale_kernel",
        "if (threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);",
        "negate",
        "^@",
        "other threads of the block store the same 1",
    ),
    Equivalent(
        UPDATES,
        "if (blockIdx.x == 0 && threadIdx.x == 0 && scalars.found_inf)",
        "negate",
        r"or\.pred",
        "other threads and blocks store the same 1",
    ),
    Equivalent(
        UPDATES,
        "ptx::store_any(scalars.found_inf, 1.0f);",
        "weaken",
        r"atom\.global",
        "one thread of the grid stores it",
    ),
    Equivalent(
        "(unscale|check_finite)_kernel",
        "threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);",
        "negate",
        r"setp\.ne\.s32 .*, 0 ->",
        "other threads of the block store the same 1",
    ),
    # The comparison of steps.
    Equivalent(
        rf"{UPDATES}<amp_ext::InlineTable<.*, 1024>",
        "differ |= *entries[i].step != *step;",
        "immediate",
        r"and\.b32.* 255 -> .* 254",
        "the smallest table has fewer tensors than a block has threads: each compares one step",
    ),
    Equivalent(
        "sgd_kernel",
        "if (threadIdx.x == 0) set_factors(entry.step);",
        "drop",
        r"st\.shared\.v4",
        "the first four factors are the same at each step",
    ),
    Equivalent(
        UPDATES,
        "differ |= *entries[i].step != *step;",
        "negate",
        r"setp\.ne\.s32",
        "the first step equals itself, so that steps count as different and each is compared anew",
    ),
    # Lanes of a warp.
    Equivalent(
        "gemm_kernel",
        "const int lane = threadIdx.x % 32;",  # of FragmentReader alone
        "immediate",
        r"and\.b32.* 31 -> .* 30",
        "every use shifts it right, in all instances: the row in a matrix has a mask of its own",
    ),
    # Sums.
    Equivalent(
        "grad_norm_kernel",
        "__shfl_xor_sync",
        "kind",
        r"bfly.*down",
        "only lane 0 uses the sum, and its terms are the same",
    ),
    Equivalent(
        "grad_norm_kernel",
        "if (squares >= kLeastSum",
        "negate",
        r"setp\.ltu.*setp\.geu",
        "the slower sum of doubles has the same value",
    ),
    Equivalent(
        "grad_norm_kernel",
        "Element<float>::finite(squares)",
        "immediate",
        r"2139095040 -> .* 2130706432",
        "the slower sum of doubles has the same value for the largest finite squares",
    ),
    Equivalent(
        "grad_norm_kernel",
        "at[i / kSize * kForeachThreads * kSize + i % kSize]",
        "immediate",
        r"-2048 -> .* -4096|-4096 -> .* -8192",
        "the batch has one unit, whose index is 0",
    ),
    Equivalent(
        "grad_norm_kernel",
        "for (int k = 0; k < decltype(size)::value; ++k)",
        "immediate",
        r"and\.b32.* -2048 -> .* -4096",
        "the rest of the batches is added pack by pack",
    ),
    Equivalent(
        "grad_norm_kernel",
        "else if (squares != 0 || !all_zero<T>(bits))",
        "negate",
        r"setp\.neu|^@",
        "the sum of doubles adds zeros again, and the result is the same",
    ),
    # Places at which an element is done.
    Equivalent(
        f"{LISTS}|{UPDATES}",
        "ptx::reversed_bits(chunk)",
        "immediate",
        r"and\.b32",
        "a chunk may begin with any warp",
    ),
    Equivalent(
        "cast_kernel",
        "const int tail = head + groups * Group<To, From>::kSize;",
        "immediate",
        r"and\.b32",
        "elements of the last group are cast twice, to the same bits",
    ),
    Equivalent(
        UPDATES,
        "bits & 0x7fffffffu;",
        "immediate",
        r"2147483646",
        "arithmetic never makes a NaN in which only the lowest bit is set",
    ),
)
