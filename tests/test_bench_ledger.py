"""bench/ledger.py: measurements of every age are read, and what was written comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

import ledger

BENCH = Path(ledger.__file__).parent


def test_committed_ledgers_load() -> None:
    records = ledger.read(BENCH / "results")
    assert records
    assert all(record["op"] and record["case"] and record["command"] for record in records)
    assert all(record["error"] or record["p20_us"] > 0 for record in records)
    ours = {record["provider"] for record in records} & ledger.OURS
    assert {record["provider"] for record in records if record["ratio"]} >= ours
    assert {record["driver"] for record in records if record["device"] == "cpu"} == {None}


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    written = {**ledger.DEFAULTS, "op": "unscale", "command": "a", "p20_us": 2.0, "extra": 1}
    ledger.append(file, [written])
    ledger.append(file, [{"op": "cast", "calls": 3}])
    first, second = ledger.read(file)
    assert first == written
    assert (second["op"], second["calls"], second["baseline"]) == ("cast", 3, "torch")
    assert ledger.read(tmp_path) == [first, second]


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"provider": "amp_ext"}, {"provider": "cpu"}),
        ({"op": "cast", "device": "cpu"}, {"command": "python bench/run.py cast --device cpu"}),
        ({"case": "limit: copy 64 Mi fp32"}, {"case": "copy 64 Mi fp32", "limit": True}),
        ({"case": "2 x 10 fp32 (not counted)"}, {"case": "2 x 10 fp32", "counted": False}),
        (
            {"case": "fp16 1024^3 NN (to fp32)"},
            {"case": "fp16 1024^3 NN", "counted": False, "baseline": "fp32", "dtype": "fp16"},
        ),
        (
            {"op": "autocast", "case": "mm, FP16, with backward"},
            {"case": "fp16 mm, fwd+bwd", "dtype": "fp16"},
        ),
        ({"case": "300 x 10 fp32+bf16"}, {"dtype": None}),
        ({"case": "bf16 MLP, forward"}, {"dtype": "bf16"}),
        ({"case": "bf16 MLP, forward", "dtype": "fp16"}, {"dtype": "fp16"}),
    ],
)
def test_old_lines_are_brought_up_to_date(tmp_path: Path, old: dict, now: dict) -> None:
    file = tmp_path / "a.jsonl"
    ledger.append(file, [{"op": "unscale", **old}])
    (record,) = ledger.read(file)
    assert record | now == record


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
