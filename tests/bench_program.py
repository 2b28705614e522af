"""The benchmark program, run in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How busy the machine is shall not matter; one thread is enough for quick cases."""
    import bench_train
    import timing

    monkeypatch.setattr(timing, "foreign_load", lambda wait: 0.0)
    monkeypatch.setattr(bench_train, "pixels", lambda setup: 8)
    monkeypatch.setitem(timing.QUICK, "cpu", timing.Budget(0.0, 3, 20.0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_quick(file: Path, *options: str) -> tuple[int, list[dict]]:
    """The exit status of `run.py OPTIONS --device cpu --quick --json file`, and its records."""
    import run

    status = run.main([*options, "--device", "cpu", "--quick", "--json", str(file)])
    lines = file.read_text().splitlines() if file.exists() else []
    return status, [json.loads(line) for line in lines]
