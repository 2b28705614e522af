"""The GEMM kernels under AddressSanitizer and ThreadSanitizer: nothing outside of their arguments
is touched, and nothing at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from simt.build import FEW_SM90_TILES, FEW_TILES
from simt.sanitize import build_few_sanitized, sanitized

TESTS = Path(__file__).resolve().parent

# Of few instances, with tiles of each kind. Single rows and columns have plans with others.
ADDRESSES = (
    f"({FEW_TILES} and test_tails and (nn or tt)) or strides_of_single or test_bias "
    "or layouts_of_c or (test_edges and not (sizes4 or sizes5 or sizes6))"
)
RACES = (
    f"{FEW_TILES} and ((test_every_schedule and ([0- or [7-)) "
    "or (error_is_that_of_a_sum and 40) or all_at_once)"
)

# Of races only those of the threads' own accesses show: of shares and sums, and of boxes among the
# threads of a consumer.
SM90_ADDRESSES = (
    "tiles_outside or batches_and_terms or (shares_behind and 3) or test_bias "
    "or (all_at_once and fp16)"
)
SM90_RACES = "(test_every_schedule and 1-) or (all_at_once and fp16 and (none or derivative))"

RUNS = {
    "asan": ("gemm_kernels", ADDRESSES),
    "tsan": ("gemm_kernels", RACES),
    "asan-sm90": ("gemm_sm90", f"{FEW_SM90_TILES} and ({SM90_ADDRESSES})"),
    "tsan-sm90": ("gemm_sm90", f"{FEW_SM90_TILES} and ({SM90_RACES})"),
}


@pytest.mark.parametrize("run", RUNS)
def test_under_a_sanitizer(run: str) -> None:
    variant, (name, selected) = run.partition("-")[0], RUNS[run]
    library = build_few_sanitized(variant)
    files = (str(TESTS / f"test_{name}{part}.py") for part in ("", "_epilogue"))
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", selected)
    done = sanitized(variant, *pytest_, *files, library=library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
