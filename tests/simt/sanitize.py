"""Run tests on kernels that a sanitizer watches, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from simt import build


def environment(variant: str) -> dict[str, str]:
    """Return the environment in which a library of this variant can be loaded."""
    return os.environ | {
        "LD_PRELOAD": build.preload(variant),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        "AMP_EXT_SIMT": variant,
        "OMP_NUM_THREADS": "1",  # torch's own threads are not instrumented
        "CUDA_VISIBLE_DEVICES": "",  # the driver does not start under a sanitizer
    }


def sanitized(variant: str, *command: str, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizer's runtime, the library having been built before."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment(variant),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def build_sanitized(variant: str, **options: Any) -> None:
    if reason := build.missing(variant):
        pytest.skip(reason)
    build.build(variant, **options)
