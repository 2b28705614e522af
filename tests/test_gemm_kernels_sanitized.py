"""The GEMM kernel under AddressSanitizer and ThreadSanitizer: nothing outside of its arguments is
touched, and nothing at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from simt.sanitize import build_sanitized, sanitized

TESTS = Path(__file__).resolve().parent
ADDRESSES = (
    "(test_tails and (nn or tt)) or strides_of_single or test_edges or test_bias or layouts_of_c"
)
RACES = "(test_every_schedule and (0 or 7)) or (error_is_that_of_a_sum and 40) or all_at_once"


@pytest.mark.parametrize(
    ("variant", "selected"), [("asan", ADDRESSES), ("tsan", RACES)], ids=["asan", "tsan"]
)
def test_under_a_sanitizer(variant: str, selected: str) -> None:
    build_sanitized(variant)
    files = (str(TESTS / f"test_{name}.py") for name in ("gemm_kernels", "gemm_kernels_epilogue"))
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", selected)
    done = sanitized(variant, *pytest_, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
