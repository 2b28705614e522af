"""README's performance section and figures say what the ledgers say, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import evidence
from harness import ledger
from figures import plot
from figures import readme
from bench_program import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
NEWER = "2031-01-01T00:00:00+00:00"
COMMAND = record()["command"]
WRONG = {"ratio": None, "error": "CheckError: wrong"}
LIMIT = {"case": "copy 64 Mi", "provider": "copy", "limit": True, "ratio": None}


def test_readme_is_what_the_ledgers_say() -> None:
    shown = (ROOT / "README.md").read_text().partition(readme.BEGIN + "\n")[2]
    assert shown.partition("\n" + readme.END)[0] == readme.section(RESULTS), "run `make readme`"
    assert readme.stale(RESULTS, ROOT / readme.PLOTS) == ([], []), "run `make readme`"


def test_a_readme_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md lacks <!-- performance"):
        readme.replaced("# amp_ext\n", "")


def test_the_table(tmp_path: Path) -> None:
    """Means by hand: 2 and 8 have the geometric mean 4, and 3 and 12 have 6."""
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
    assert readme.NO_GPU in readme.section(tmp_path)
    of_gpu = {"device": "cuda", "device_name": "Some GPU", "provider": "cuda", "cuda": "13.0"}
    gpu = [record(**of_gpu, ratio=3.0), record(**of_gpu, case="8 x 8", ratio=12.0)]
    ledger.append(tmp_path / "some-gpu/1.jsonl", gpu)
    lines = readme.section(tmp_path).splitlines()
    assert readme.NO_GPU not in lines
    assert [line for line in lines if line.startswith(("#", "| unscale", "-"))] == [
        "### GPU: Some GPU",
        "| unscale | cuda | torch | 2 | 6.00 | 3.00 (7 x 7) | 12.0 (8 x 8) |",
        f"- unscale: torch 2.99, cuda 13.0, commit abc1234, 2030-01-01, `{COMMAND}`",
        "### CPU: Some CPU",
        "| unscale | cpu | torch | 2, 1 refused | 4.00 | 2.00 (7 x 7) | 8.00 (8 x 8) |",
        "| unscale | cpu | torch, FP32 | 1 | 2.50 | 2.50 (8 x 8) | 2.50 (8 x 8) |",
        "| unscale | triton |  | 0, 1 refused |  |  |  |",
        f"- unscale: torch 2.99, 3 threads, commit abc1234, 2030-01-01, `{COMMAND}`",
    ]


OLD, NEW = record(), record(ratio=3.0, utc=NEWER)
GONE = record(case="8 x 8", ratio=8.0)


@pytest.mark.parametrize(
    ("records", "ratios"),
    [
        ([OLD, GONE, NEW], {"7 x 7": 3.0, "8 x 8": 8.0}),
        ([NEW, OLD], {"7 x 7": 3.0}),
        ([OLD, record(utc=NEWER, **WRONG)], {}),
        ([OLD, GONE, record(**LIMIT | {"utc": NEWER}), NEW], {"7 x 7": 3.0}),
        (
            [OLD, GONE]
            + [record(**each, utc=NEWER, command=f"{COMMAND} --filter 7") for each in (LIMIT, {})],
            {"7 x 7": 2.0, "8 x 8": 8.0},
        ),
        ([OLD, {**NEW, "command": f"{COMMAND} --quick"}], {"7 x 7": 2.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --ours"}], {"7 x 7": 2.0}),
    ],
    ids=["newest", "by date", "wrong", "whole table", "part of a table", "quick", "ours alone"],
)
def test_which_measurement_of_a_case_counts(
    tmp_path: Path, records: list[ledger.Record], ratios: dict[str, float]
) -> None:
    ledger.append(tmp_path / "cpu/1.jsonl", records)
    (run,) = evidence.newest(tmp_path)
    assert {case: ratio for each in run.ratios.values() for case, ratio in each.cases.items()} == (
        ratios
    )


def test_quick_runs_count_where_they_are_asked_for_and_alone(tmp_path: Path) -> None:
    quick = record(ratio=9.0, utc=NEWER, command=f"{COMMAND} --quick")
    ledger.append(tmp_path / "cpu/1.jsonl", [quick])
    assert evidence.newest(tmp_path) == []
    assert evidence.newest(tmp_path, quick=True)[0].ratios["cpu"].cases == {"7 x 7": 9.0}
    ledger.append(tmp_path / "cpu/1.jsonl", [record()])
    assert evidence.newest(tmp_path, quick=True)[0].ratios["cpu"].cases == {"7 x 7": 2.0}


def test_the_lines_of_a_case_are_of_one_run(tmp_path: Path) -> None:
    """A provider that took part the time before, but not the last one, is not shown."""
    ledger.append(tmp_path / "cpu/1.jsonl", [record(), record(provider="compile"), NEW])
    (run,) = evidence.newest(tmp_path)
    assert [each["provider"] for each in run.measured] == ["cpu"]


def test_commands_are_shown_without_their_files() -> None:
    words = "python bench/run.py unscale --json '/a b/c.jsonl' --quick --results /d"
    assert evidence.command(record(command=words)) == "python bench/run.py unscale --quick"


def test_a_figure_is_drawn_again_when_what_it_shows_has_changed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    from figures import draw

    plots = tmp_path / "plots"
    file, path = tmp_path / "cpu/1.jsonl", plots / "cpu.steps.svg"
    ledger.append(file, [record(op="train")])
    figure = readme.figures(tmp_path)["cpu.steps.svg"]
    assert readme.stale(tmp_path, plots) == ([(path, figure)], [])
    draw.write(figure, path)
    once = path.read_bytes()
    assert readme.stale(tmp_path, plots) == ([], [])
    draw.write(figure, path)
    assert path.read_bytes() == once
    ledger.append(file, [record(op="train", p50_us=1.5, utc=NEWER)])
    assert [changed for changed, _ in readme.stale(tmp_path, plots)[0]] == [path]
    (plots / "gone.steps.svg").touch()
    assert readme.stale(tmp_path, plots)[1] == [plots / "gone.steps.svg"]


def test_all_figures_are_drawn_and_two_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    every = [record(op="train"), record(**LIMIT, op="cast", gb_per_s=4.0)]
    for provider in ("cpu", "torch"):
        every.append(record(op="cast", provider=provider, bytes=8, gb_per_s=2.0))
        product = {"bytes": 8, "flops": 64, "gflop_per_s": 5.0, "dtype": "fp16"}
        every.append(record(op="gemm", provider=provider, **product))
    results = tmp_path / "results"
    for machine in ("a", "b"):
        ledger.append(results / machine / "1.jsonl", every)
    ledger.append(results / "c/1.jsonl", [record(op="train")])
    assert list(readme.figures(results)) == ["a.steps.svg", "a.roofline.svg"]
    options = ["--results", str(results), "--out", str(tmp_path), "--formats", "png"]
    assert plot.main(options) == 0
    assert len(list(tmp_path.glob("*.png"))) == 3 + 3 + 1
    assert "c: roofline: left out, the ledger has no lines of gemm" in capsys.readouterr().out
