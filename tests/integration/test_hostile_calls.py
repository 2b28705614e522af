"""Test that hostile calls of every op are right, or an error without a change."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).with_name("hostile_calls.py").resolve()
SEEDS = range(3)
CRASHES = 5  # later calls of the seed are skipped


def wrong_calls(seed: int, count: int, log: Path) -> list[str]:
    """Make calls in child processes, a new one after each crash; return the wrong calls."""
    wrong: list[str] = []
    first = crashes = 0
    while first < count and crashes < CRASHES:
        options = [f"--seed={seed}", f"--first={first}", f"--count={count - first}"]
        child = subprocess.run(
            [sys.executable, str(PROGRAM), *options, f"--log={log}"],
            capture_output=True,
            text=True,
            timeout=30 + count,
        )
        wrong += re.findall(r"^WRONG .*\n.*", child.stdout, re.MULTILINE)
        if re.search(r"^DONE ", child.stdout, re.MULTILINE):
            return wrong
        crashes += 1
        call = log.read_text() if log.exists() else ""
        assert call, child.stderr
        wrong.append(f"CRASH {child.returncode} seed {seed} call {call}\n{child.stderr[-1000:]}")
        first = int(call.split()[0]) + 1
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_calls(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Hostile calls are right or refused; `make hostile` makes 15,000 calls."""
    count = request.config.getoption("--hostile-calls")
    wrong = wrong_calls(seed, count, tmp_path / "call")
    again = f"{sys.executable} {PROGRAM} --seed={seed} --first=NUMBER --log=/dev/stderr"
    assert not wrong, "\n".join([*wrong, f"To make one of the calls again: {again}"])
