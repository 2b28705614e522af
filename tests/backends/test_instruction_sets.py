"""The CPU backend with other instructions than this processor's: same suites, same results."""

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
    """Return the output of Python with more variables, which must succeed."""
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


@pytest.fixture(scope="module")
def brgemm(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The variables under which a stand-in takes the place of torch's brgemm."""
    library = tmp_path_factory.mktemp("brgemm") / "libbrgemm.so"
    flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
    source = Path(__file__).with_name("brgemm.cpp")
    command = [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


WHO_MULTIPLIES = """
import torch
from amp_ext import _C
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    print(_C.multiplies(dtype))
torch.backends.mkldnn.enabled = False
print(_C.multiplies(torch.bfloat16))
"""


def test_brgemm_is_found(brgemm: Mapping[str, str]) -> None:
    """A user of torch may turn oneDNN off."""
    assert run(brgemm, "-c", WHO_MULTIPLIES).split() == ["True", "True", "False", "False"]


WHO_COMPUTES = """
import torch
from amp_ext import _C
_C.set_gemm_mode("auto")
for k in (128, 129):
    print(_C.gemm_choice(*(torch.zeros(s).bfloat16() for s in ((128, k), (k, 128))))[0])
"""


def test_torchs_library_gets_no_odd_k(brgemm: Mapping[str, str]) -> None:
    """It would read one element past the rows of a."""
    assert run(brgemm, "-c", WHO_COMPUTES).split() == ["library", "cpu"]


def test_blocks_by_brgemm(brgemm: Mapping[str, str]) -> None:
    """b is in pairs of rows for BF16, and in rows for FP16."""
    run_suites(brgemm, "gemm/test_gemm_cpu.py")


@pytest.mark.full
def test_products_by_brgemm(brgemm: Mapping[str, str]) -> None:
    run_suites(brgemm, *PRODUCTS)
