"""Test the format of ledgers and the results shown in docs/measuring.md."""

from __future__ import annotations

import json
import re
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


# ---- ledgers -----------------------------------------------------------------------------------


def test_appended_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    first, second = record(extra=1), record(op="cast", p20_us=None)
    ledger.append(file, [first])
    ledger.append(file, [second])
    assert ledger.read(file) == ledger.read(tmp_path) == [first, second]
    with pytest.raises(FileNotFoundError, match="no ledger at"):
        ledger.read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"op": "uns', "is not a JSON object"),
        ("3", "is not a JSON object"),
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
def test_a_ledger_belongs_to_a_device(tmp_path: Path, device: str, name: str, folder: str) -> None:
    file = ledger.file_in(tmp_path, device, name, "168b509")
    assert file.parent == tmp_path / folder
    assert file.name.endswith("-168b509.jsonl")


# ---- docs/measuring.md -------------------------------------------------------------------------


def test_the_results_are_what_the_ledgers_say() -> None:
    shown = page.PAGE.read_text().partition(page.BEGIN + "\n")[2]
    results = shown.partition("\n" + page.END)[0]
    assert results == page.section(RESULTS), "run `make figures`"


@pytest.mark.parametrize("pattern", ["README*.md", "CONTRIBUTING.md", "docs/*.md"])
def test_links_lead_somewhere(pattern: str) -> None:
    for file in ROOT.glob(pattern):
        text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, heading = link.partition("#")
            target = file.parent / path if path else file
            assert target.exists(), f"{file.name}: {link}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
                assert heading in anchors, f"{file.name}: {link}"


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
        ([OLD, OTHER, NEW], {"7 x 7": 3.0, "8 x 8": 8.0}),
        ([NEW, OTHER, OLD], {"7 x 7": 3.0, "8 x 8": 8.0}),
        ([OLD, OTHER, record(utc=NEWER, **WRONG)], {"8 x 8": 8.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --quick"}], {"7 x 7": 2.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --providers=cpu"}], {"7 x 7": 2.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --sizes 7x7"}], {"7 x 7": 2.0}),
    ],
    ids=["newest", "by date", "wrong", "quick", "of some providers", "of some sizes"],
)
def test_the_newest_whole_measurement_of_a_case_counts(
    tmp_path: Path, records: list[ledger.Record], ratios: dict[str, float]
) -> None:
    ledger.append(tmp_path / "cpu/1.jsonl", records)
    (run,) = page.newest(tmp_path)["cpu"]
    assert run.ratios["cpu"] == ratios


def test_the_lines_of_a_case_are_of_one_run(tmp_path: Path) -> None:
    """A provider missing from the last run is not shown."""
    records = [record(), record(provider="compile"), OTHER, NEW]
    ledger.append(tmp_path / "cpu/1.jsonl", records)
    (run,) = page.newest(tmp_path)["cpu"]
    assert [each["provider"] for each in run.measured if each["case"] == "7 x 7"] == ["cpu"]


def test_commands_are_shown_without_their_files() -> None:
    words = "python bench/run.py unscale --json '/a b/c.jsonl' --quick --results /d"
    shown = page.source(record(command=words))
    assert shown.endswith(", `python bench/run.py unscale --quick`")


def test_every_machine_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = pytest.importorskip("plot", reason="figures are drawn with matplotlib")
    every = [record(op="train"), record(**LIMIT, op="cast", gb_per_s=4.0)]
    for provider in ("cpu", "torch"):
        every.append(record(op="cast", provider=provider, bytes=8, gb_per_s=2.0))
        product = {"bytes": 8, "flops": 64, "gflop_per_s": 5.0, "dtype": "fp16"}
        every.append(record(op="gemm", provider=provider, **product))
    results = tmp_path / "results"
    ledger.append(results / "a/1.jsonl", every)
    ledger.append(results / "b/1.jsonl", [record(op="train")])
    assert [file for _, file, _ in page.figures(results)] == ["a.steps.svg", "a.roofline.svg"]
    assert plot.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 2 + 1
    assert "b: no roofline, the ledger has no right result of gemm" in capsys.readouterr().out
