"""Test the format of ledgers and the results shown in docs/measuring.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_program import BENCH, record
from harness import ledger, page

ROOT = BENCH.parent
RESULTS = BENCH / "results"
NEWER = "2031-01-01T00:00:00+00:00"
COMMAND = record()["command"]
WRONG = {"ratio": None, "error": "CheckError: wrong"}
LIMIT = {"case": "copy 64 Mi", "provider": "copy", "limit": True, "ratio": None}


# ---- docs/measuring.md -------------------------------------------------------------------------


def test_the_results_are_what_the_ledgers_say() -> None:
    shown = page.PAGE.read_text().partition(page.BEGIN + "\n")[2]
    results = shown.partition("\n" + page.END)[0]
    assert results == page.section(RESULTS), "run `make figures`"


def test_committed_figures_are_of_the_ledgers() -> None:
    draw = pytest.importorskip("plot", reason="figures are drawn with matplotlib")
    wanted = {file: draw.digest(runs) for _, file, runs in page.figures(RESULTS)}
    found = sorted((ROOT / page.PLOTS).iterdir())
    assert [path.name for path in found] == sorted(wanted), "run `make figures`"
    for path in found:
        assert f">data {wanted[path.name]}<" in path.read_text(), "run `make figures`"


def test_the_table_has_means_worst_and_best(tmp_path: Path) -> None:
    """The table has means by hand: 2 and 8 have the geometric mean 4, and 3 and 12 have 6."""
    cpu = [
        record(**LIMIT),
        record(),
        record(provider="triton", **WRONG),
        record(case="8 x 8", ratio=8.0, p20_us=2.0),
        record(case="8 x 8", provider="fp32", ratio=None, p20_us=5.0),
        record(case="9 x 9", **WRONG),
        record(case="1 x 1", ratio=0.01, counted=False),
    ]
    ledger.append(tmp_path / "a-cpu/1.jsonl", cpu)
    of_gpu = {"device": "cuda", "device_name": "Some GPU", "provider": "cuda", "cuda": "13.0"}
    gpu = [record(**of_gpu, ratio=3.0), record(**of_gpu, case="8 x 8", ratio=12.0)]
    ledger.append(tmp_path / "some-gpu/1.jsonl", gpu)
    lines = page.section(tmp_path).splitlines()
    assert [line for line in lines if line.startswith(("#", "| unscale", "-"))] == [
        "### GPU: Some GPU",
        "| unscale | cuda | torch | 2 | 6.00 | 3.00 (7 x 7) | 12.0 (8 x 8) |",
        f"- unscale: torch 2.99, cuda 13.0, commit abc1234, 2030-01-01, `{COMMAND}`",
        "### CPU: Some CPU",
        "| unscale | cpu | torch | 2, 1 failed | 4.00 | 2.00 (7 x 7) | 8.00 (8 x 8) |",
        "| unscale | cpu | torch, FP32 | 1 | 2.50 | 2.50 (8 x 8) | 2.50 (8 x 8) |",
        "| unscale | triton |  | 0, 1 failed |  |  |  |",
        f"- unscale: torch 2.99, 3 threads, commit abc1234, 2030-01-01, `{COMMAND}`",
    ]


OLD, NEW = record(), record(ratio=3.0, utc=NEWER)
OTHER = record(case="8 x 8", ratio=8.0)


@pytest.mark.parametrize(
    ("records", "ratios"),
    [
        ([NEW, OTHER, OLD], {"7 x 7": 3.0, "8 x 8": 8.0}),
        ([OLD, OTHER, record(utc=NEWER, **WRONG)], {"8 x 8": 8.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --quick"}], {"7 x 7": 2.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --providers=cpu"}], {"7 x 7": 2.0}),
    ],
    ids=["by date", "wrong", "quick", "of some providers"],
)
def test_the_newest_whole_measurement_of_a_case_counts(
    tmp_path: Path, records: list[ledger.Record], ratios: dict[str, float]
) -> None:
    ledger.append(tmp_path / "cpu/1.jsonl", records)
    (run,) = page.newest(tmp_path)["cpu"]
    assert run.ratios["cpu"] == ratios
