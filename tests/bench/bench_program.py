"""Run the benchmark program in this process, and make lines of ledgers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import threads
from harness import ledger, timing
from ops import train

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take few samples on one thread."""
    monkeypatch.setattr(train, "pixels", lambda setup: 8)
    monkeypatch.setitem(timing.QUICK, "cpu", timing.Budget(0.0, 3, 20.0))
    with threads(1):
        yield


def run_quick(file: Path, *options: str) -> tuple[int, list[dict]]:
    """Return the exit status and the records of a quick run on the CPU."""
    import run

    status = run.main([*options, "--device", "cpu", "--quick", "--json", str(file)])
    lines = file.read_text().splitlines() if file.exists() else []
    return status, [json.loads(line) for line in lines]


def record(**changes: object) -> ledger.Record:
    """Return a line of a ledger."""
    return {
        **dict.fromkeys(ledger.Record.__annotations__),
        "op": "unscale",
        "case": "7 x 7",
        "limit": False,
        "provider": "cpu",
        "baseline": "torch",
        "p20_us": 1.0,
        "p50_us": 1.0,
        "p80_us": 1.0,
        "ratio": 2.0,
        "counted": True,
        "device": "cpu",
        "device_name": "Some CPU",
        "threads": 3,
        "torch": "2.99",
        "commit": "abc1234",
        "utc": "2030-01-01T00:00:00+00:00",
        "command": "python bench/run.py unscale --device cpu",
        **changes,
    }
