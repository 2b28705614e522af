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
        "gemm_kernel",
        "ptx::cp_async_wait<kStages - 2>();",
        "",
        r"cp\.async\.wait_group 0 -> .*",
        "tiles of two stages, which take operands of any alignment, copy nothing asynchronously",
    ),
    Equivalent(
        "gemm_kernel",
        "ptx::cp_async_commit();",
        "drop",
        r"cp\.async\.commit_group",
        "tiles of two stages, which take operands of any alignment, copy nothing asynchronously",
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
        "two blocks share the pieces evenly; the updates have three blocks and the same lines",
    ),
    # The store of found_inf.
    Equivalent(
        "(unscale|check_finite)_kernel",
        "threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);",
        "negate",
        r"setp\.ne\.s32 .*, 0 ->",
        "other threads of the block store the same 1",
    ),
    # The comparison of steps.
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
        "const int lane = threadIdx.x % 32;",
        "immediate",
        r"and\.b32.* 31 -> .* 30",
        "the lane's quad or matrix is taken from it, which the lowest bit does not change",
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
        r"-2048 -> .* -4096",
        "the batch has one unit, whose index is 0",
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
        LISTS,
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
