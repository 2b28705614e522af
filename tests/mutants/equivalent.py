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
        "whether one is bad has nothing of their order",
    ),
    Equivalent(
        "unscale_kernel",
        "return bad |= !E::finite(x), x;",
        "swap",
        ANY_ORDER,
        "a factor of 1 only looks, in any order",
    ),
    Equivalent(
        "grad_norm_kernel", "", "swap", ANY_ORDER, "sums of the same terms, within their rounding"
    ),
    Equivalent(
        "check_finite_kernel",
        "const int singles = span.n - count * kPack;",
        "immediate",
        "and",
        "more single elements: some are looked at twice",
    ),
    Equivalent(
        "check_finite_kernel",
        "% 16 / sizeof(T)",
        "immediate",
        r"and\.b64",
        "bits of the mask that the address's alignment makes 0",
    ),
    Equivalent(
        "unscale_kernel",
        "return bad |= !E::finite(x), x;",
        "immediate",
        r"and\.b32.*, -\d+ ->",
        "a factor of 1 only looks, at some elements twice",
    ),
    Equivalent(
        "check_finite_kernel",
        "for (T& value : values.at) value = f(value);",
        "immediate",
        r"and\.b32.*, 512 -> .*, 0",
        "elements are looked at twice",
    ),
    # Alignment.
    Equivalent(
        "gemm_kernel",
        "reinterpret_cast<uintptr_t>(at) % 16 == 0",
        "immediate",
        r"and\.b64.* 15 -> .* 14",
        "addresses of elements are even",
    ),
    Equivalent(
        "gemm_kernel",
        "ptx::cp_async_wait<kStages - 2>();",
        "",
        r"cp\.async\.wait_group 0 -> .*",
        "tiles of two stages, which take operands of any alignment, copy nothing asynchronously",
    ),
    # The search for the tensor of a block's first chunk.
    Equivalent(
        r"\w+_kernel",
        "while (high - low > 1) {",
        "negate",
        "",
        "the walk goes on from an earlier tensor to the right one",
    ),
    # Sums.
    Equivalent(
        "grad_norm_kernel",
        "__shfl_xor_sync",
        "kind",
        r"bfly.*down",
        "lane 0 alone uses the sum, which has the same terms",
    ),
    Equivalent(
        "grad_norm_kernel",
        "if (squares >= kLeastSum",
        "negate",
        r"setp\.ltu.*setp\.geu",
        "the slower sum of doubles has the same value; small squares are a case of their own",
    ),
    Equivalent(
        "grad_norm_kernel",
        "Element<float>::finite(squares)",
        "immediate",
        r"2139095040 -> .* 2130706432",
        "the largest finite squares are summed as doubles, to the same",
    ),
    Equivalent(
        "grad_norm_kernel",
        "at[i / kSize * kForeachThreads * kSize + i % kSize]",
        "immediate",
        r"-2048 -> .* -4096",
        "a batch of one unit, of which the index is 0",
    ),
    Equivalent(
        "grad_norm_kernel",
        "else if (squares != 0 || !all_zero<T>(bits))",
        "negate",
        r"setp\.neu",
        "all_zero() is asked in the other case; adding again has the same result",
    ),
    # Places at which an element is done.
    Equivalent(
        LISTS,
        "ptx::reversed_bits(chunk)",
        "immediate",
        r"and\.b32",
        "another first warp of a chunk; any does",
    ),
    Equivalent(
        "cast_kernel",
        "const int tail = head + groups * Group<To, From>::kSize;",
        "immediate",
        r"and\.b32",
        "elements of the last group are cast once more, by the same bits",
    ),
    Equivalent(
        UPDATES,
        "bits & 0x7fffffffu;",
        "immediate",
        r"2147483646",
        "arithmetic makes no NaN of which the lowest bit alone is set",
    ),
)
