"""The GEMM kernel under AddressSanitizer: it reads and writes nothing outside of its arguments."""

from __future__ import annotations

from pathlib import Path

from simt.sanitize import build_sanitized, sanitized

TESTS = Path(__file__).resolve().parent
SELECTED = (
    "(test_tails and (nn or tt)) or strides_of_single or test_edges or test_bias or layouts_of_c"
)


def test_nothing_outside_is_touched() -> None:
    build_sanitized("asan")
    files = (str(TESTS / f"test_{name}.py") for name in ("gemm_kernels", "gemm_kernels_epilogue"))
    pytest = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", SELECTED)
    done = sanitized("asan", *pytest, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
