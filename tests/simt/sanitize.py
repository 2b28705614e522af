"""Run tests on kernels that a sanitizer watches, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
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


def sanitized(
    variant: str, *command: str, library: Path | None = None, timeout: int = 900
) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizer's runtime, the library having been built before.

    Where none is named, it is the one that the command would build.
    """
    named = {"AMP_EXT_SIMT_LIBRARY": str(library)} if library else {}
    return subprocess.run(
        [sys.executable, *command],
        env=environment(variant) | named,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def build_sanitized(variant: str, **options: Any) -> Path:
    if reason := build.missing(variant):
        pytest.skip(reason)
    return build.build(variant, **options)


def build_few_sanitized(variant: str) -> Path:
    """Build the library of few instances: those of all take minutes to compile."""
    return build_sanitized(variant, name="few", sources=build.few_sources())
