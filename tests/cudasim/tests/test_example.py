"""Test the example for users, built by the command of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim import build, cuda

HERE = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    bool(cuda.missing()) or "LD_PRELOAD" in os.environ, reason=cuda.missing() or "runs on cudasim"
)


def test_the_race_of_the_example_is_found(tmp_path: Path) -> None:
    """All tests of the example pass, except the one of the kernel without a barrier."""
    source, library = HERE / "example/transpose.cu", tmp_path / "libexample.so"
    flags = ["-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared"]
    build.call(["nvcc", *flags, "-o", str(library), str(source)])
    command = [sys.executable, "-m", "cudasim", "--sources", str(source), "--capability", "80"]
    command += ["--", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "example")]
    environment = os.environ | {"EXAMPLE": str(library), "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    report = re.search(r"transpose_in_haste.*race.*", done.stdout + done.stderr, re.DOTALL)
    assert report
    text = source.read_text().splitlines()
    haste = next(i for i, line in enumerate(text) if "void transpose_in_haste" in line)
    for what in ("tile[threadIdx.y + j][threadIdx.x] =", "tile[threadIdx.x][threadIdx.y + j]"):
        line = next(i for i in range(haste, len(text)) if what in text[i]) + 1
        assert re.search(rf"transpose\.cu:({line}|{line - 1})\b", report[0]), report[0]
