"""The CPU backend on narrower vectors than this processor's widest: same suite, same results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
SUITES = (
    "lists",
    "optim",
    "gemm/test_gemm.py",
    "gemm/test_gemm_cpu.py",
    "gemm/test_gemm_epilogue.py",
    "gemm/test_gemm_activations.py",
)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_conformance(capability: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", "cpu", "-m", "not full"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *SUITES],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
