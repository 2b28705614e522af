"""tests/gpu_fault.py: a test that spoils its process, or hangs, takes no other with it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FAULTY = """
import sys, time
from types import SimpleNamespace

def synchronize():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_faults():
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    assert False, "the GPU said so"

def test_hangs():
    time.sleep(60)

def test_works():
    assert "torch" not in sys.modules
"""


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is missing")
def test_a_test_that_faults_or_hangs_takes_no_other_with_it(tmp_path):
    (tmp_path / "test_some.py").write_text(FAULTY)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "gpu_fault", "--test-limit", "2"]
    command += ["-n", "1", "--dist", "worksteal", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert "the GPU said so" in run.stdout
    for name in ("test_faults", "test_hangs"):
        assert re.search(rf"crashed while running '.*::{name}'", run.stdout)
    assert re.search(r'test_some.py", line \d+ in test_hangs', run.stdout + run.stderr)
    assert " 1 passed in " in run.stdout
