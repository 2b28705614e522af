"""Test that hostile calls of every op are right, or an error without a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).with_name("hostile_calls.py").resolve()
SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_calls(seed: int, request: pytest.FixtureRequest) -> None:
    """Hostile calls are right or refused; `make hostile` makes 15,000 calls.

    The calls run in a child process, because one may crash.
    """
    count = request.config.getoption("--hostile-calls")
    command = [sys.executable, str(PROGRAM), str(seed), "0", str(count)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=30 + count)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr[-3000:]}\n{' '.join(command)}"
