"""The GEMM kernels under AddressSanitizer and ThreadSanitizer: nothing outside of their arguments
is touched, and nothing at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from simt.build import FEW_SM90_TILES, FEW_TILES
from simt.sanitize import build_few_sanitized, sanitized

pytestmark = pytest.mark.full
TESTS = Path(__file__).resolve().parent

# Of few instances, with tiles of each kind. Single rows and columns have plans with others.
ADDRESSES = (
    f"{FEW_TILES} and (test_tails and (nn or tt) or (all_at_once and fp16)) "
    "or (test_layouts_of_c and fp16 and not tma) "
    "or (test_edges and not (sizes4 or sizes5 or sizes6))"
)
RACES = (
    f"{FEW_TILES} and ((test_every_schedule and ([0- or [7-)) "
    "or (error_is_that_of_a_sum and 40) or (all_at_once and fp32))"
)

# Of races only those of the threads' own accesses show: of shares and sums, and of boxes among the
# threads of a consumer.
SM90_ADDRESSES = (
    "tiles_outside or batches_and_sums or (shares_behind and 3) or (all_at_once and fp16)"
)
SM90_RACES = "(test_every_schedule and 1-) or (all_at_once and fp16 and (none or derivative))"

RUNS = {
    "asan": ADDRESSES,
    "tsan": RACES,
    "asan-sm90": f"{FEW_SM90_TILES} and ({SM90_ADDRESSES})",
    "tsan-sm90": f"{FEW_SM90_TILES} and ({SM90_RACES})",
}


@pytest.mark.parametrize("run", RUNS)
def test_under_a_sanitizer(run: str) -> None:
    variant = run.partition("-")[0]
    library = build_few_sanitized(variant)
    names = ("gemm_kernels", "gemm_kernels_epilogue", "gemm_sm90")
    files = (str(TESTS / f"test_{name}.py") for name in names)
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", RUNS[run])
    done = sanitized(variant, *pytest_, *files, library=library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
