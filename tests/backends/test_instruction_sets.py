"""Run the CPU backend with other instruction sets: same suites, same results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PRODUCTS = (
    "gemm/test_gemm.py",
    "gemm/test_gemm_cpu.py",
    "gemm/test_gemm_epilogue.py",
    "gemm/test_gemm_activations.py",
)


def run(variables: Mapping[str, str], *arguments: str) -> str:
    """Run Python with more environment variables, assert success, and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_suites(variables: Mapping[str, str], *suites: str) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "cpu", "-m", "not full"]
    run(variables, "-m", "pytest", *options, *suites)


@pytest.mark.full
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_narrower_vectors(capability: str) -> None:
    run_suites({"ATEN_CPU_CAPABILITY": capability}, "lists", "optim", *PRODUCTS)


WHO_MULTIPLIES = """
import torch
from amp_ext import _C
print(any(_C.multiplies(dtype) for dtype in (torch.float16, torch.bfloat16)))
"""


def test_fewer_instructions_are_asked_for() -> None:
    """ATEN_CPU_CAPABILITY also turns off the instructions for 16-bit products."""
    assert run({"ATEN_CPU_CAPABILITY": "avx2"}, "-c", WHO_MULTIPLIES).split() == ["False"]
