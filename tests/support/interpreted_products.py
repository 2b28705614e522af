"""List the tests of products in Triton's interpreter. A test takes seconds there.

Each case reaches code of the kernel that no other case reaches. Autograd, layers and promotion are
above the backends; the CPU's kernels test them.
"""

from __future__ import annotations

import fnmatch

CASES = {
    # sizes: edges of tiles, splits along k, several tiles, terms and batches
    "test_sizes": ("nn", "tt"),
    "test_one_long_side": ("(5000, 3, 5)", "(3, 5, 5000)", "(130, 1, 5000)"),
    "test_long_in_every_direction": ("(torch.float16, torch.float16)",),
    "test_batches": ("small-(4,)-(4,)", "small-()-(2, 3)", "large-(4,)-()", "small-(0,)-()"),
    "test_sum_over_the_batch": ("small-(12,)", "large-(2, 3)", "small-(2, 0)"),
    "test_inner_dimension_of_0": ("*float16", "*bfloat16"),
    "test_results_elsewhere": ("",),
    "test_operands_elsewhere": ("",),
    # layouts: TMA and pointers, each width of vectors, any strides
    "test_layouts": ("large-*", "misaligned", "every-second", "expanded-rows"),
    "test_layouts_of_c": ("*-large",),
    "test_writes_nothing_but_c": ("400-*",),
    "test_overlapping_and_scattered_operands": ("*float16", "*bfloat16"),
    # numbers: sums, rounding, infinities, NaN, subnormals
    "test_dtypes": ("torch.float16-torch.float16", "torch.bfloat16-torch.bfloat16"),
    "test_error_of_long_sums": ("*",),
    "test_error_of_a_sum_over_the_batch": ("torch.float16-*",),
    "test_rounds_to_nearest_even": ("*",),
    "test_fp16_subnormals_are_kept": ("",),
    "test_infinities_and_nans_spread_as_in_ieee": ("torch.float16-torch.float16-*",),
    "test_nan_times_a_factor_of_zero": ("torch.float16-*-small",),
    "test_sums_beyond_fp16_are_rounded_once_at_the_end": ("",),
    "test_addends_are_not_rounded_to_fp16": ("100000.0-*",),
    "test_factor_beyond_fp32": ("*",),
    "test_bitwise_repeatable": ("", "torch.float16-*"),
    # the epilogue: c, bias, activations, derivatives, sums of columns, accumulation
    "test_epilogue": ("-large", "n-large", "m1-large", "3mn-small"),
    "test_exact_epilogue": ("torch.float16-*",),
    "test_c_is_not_read_when_beta_is_0": ("*",),
    "test_values_and_aux": ("*-torch.float16-torch.float16-large",),
    "test_product_times_derivative": ("*-torch.float16-torch.float16-large",),
    "test_is_torchs_activation": ("*",),
    "test_second_derivatives_far_out": ("gelu",),
    "test_derivatives_of_infinities_and_nans": ("*-torch.float16",),
    "test_relu_stops_what_is_not_finite": ("",),
    "test_column_sums_are_of_unrounded_values": ("",),
    "test_column_sums_of_nothing": ("torch.float16-*",),
    "test_never_passes_through_fp16": ("",),
    "test_exact_sums": ("nn-large", "tn-large"),
    # from a layer to its gradients
    "test_exact_gradients": (
        "torch.float16-torch.float16-(200, 7)",
        "(torch.float16, torch.float32)-(2, 3, 5, 7)",
        "sum-tt",
        "all",
    ),
    "test_fp32_gradients_of_16_bit_leaves": ("*",),
}
"""Patterns of the parameters, by the name of the test."""


def is_listed(test: str, parameters: str) -> bool:
    """Return whether a test runs with parameters, as pytest's id has them without the executor."""
    return any(fnmatch.fnmatchcase(parameters, pattern) for pattern in CASES.get(test, ()))
