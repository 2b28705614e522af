"""bench/ledger.py: measurements of every age are read, and what was written comes back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import ledger

BENCH = Path(ledger.__file__).parent


def test_committed_ledgers_load() -> None:
    records = ledger.read(BENCH / "results")
    assert records
    assert all(record.keys() >= ledger.DEFAULTS.keys() for record in records)
    assert all(record["op"] and record["case"] and record["p20_us"] > 0 for record in records)
    assert {record["driver"] for record in records if record["device"] == "cpu"} == {None}


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    ledger.append(file, [{"op": "unscale", "p20_us": 2.0, "extra": 1}])
    ledger.append(file, [{"op": "cast", "calls": 3}])
    first, second = ledger.read(file)
    assert first == {**ledger.DEFAULTS, "op": "unscale", "p20_us": 2.0, "extra": 1}
    assert (second["op"], second["calls"], second["baseline"]) == ("cast", 3, "torch")
    assert ledger.read(tmp_path) == [first, second]


def test_lines_of_others_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "probe.jsonl"
    file.write_text('{"assumption": "swizzle"}\n\n{"op": "gemm"}\n')
    assert [record["op"] for record in ledger.read(file)] == ["gemm"]


@pytest.mark.parametrize("line", ["{", "3", '"op"'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"op": "gemm"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not a JSON object"):
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
