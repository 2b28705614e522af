"""bench/ledger.py: what was written comes back, and what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import ledger
from bench_program import record

BENCH = Path(ledger.__file__).parent


def test_committed_ledgers_load() -> None:
    records = ledger.read(BENCH / "results")
    assert records
    assert all(record["error"] or record["p20_us"] > 0 for record in records)
    ours = {record["provider"] for record in records} & ledger.OURS
    assert {record["provider"] for record in records if record["ratio"]} >= ours
    assert {record["driver"] for record in records if record["device"] == "cpu"} == {None}


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    first, second = record(extra=1), record(op="cast", p20_us=None)
    ledger.append(file, [first])
    ledger.append(file, [second])
    assert ledger.read(file) == ledger.read(tmp_path) == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ('"op"', "is not a JSON object"),
        (json.dumps(record()).replace("p20_us", "us"), "lacks p20_us"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    ledger.append(file, [record()])
    file.write_text(f"{file.read_text()}\n{line}\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl:3 {message}"):
        ledger.read(file)


@pytest.mark.parametrize(
    ("device", "name", "folder"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("cpu", "Intel(R) Xeon(R) @ 2.50GHz", "cpu-intel-r-xeon-r-2.50ghz"),
    ],
)
def test_where_a_run_belongs(tmp_path: Path, device: str, name: str, folder: str) -> None:
    file = ledger.file_in(tmp_path, device, name, "168b509")
    assert file.parent == tmp_path / folder
    assert file.name.endswith("-168b509.jsonl")
    assert ledger.file_in(tmp_path, device, name, None).name.endswith("-unknown.jsonl")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no ledger at"):
        ledger.read(tmp_path / "absent")
