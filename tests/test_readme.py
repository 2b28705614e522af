"""README's performance section says what the ledgers say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import evidence
import readme

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


@pytest.fixture
def shown() -> str:
    """The section as it stands in README.md."""
    text = (ROOT / "README.md").read_text()
    return text.partition(readme.BEGIN + "\n")[2].partition("\n" + readme.END)[0]


def line(**changes: object) -> dict:
    """A ledger's line."""
    return {
        "op": "unscale",
        "case": "7 x 7",
        "provider": "cpu",
        "p20_us": 1.0,
        "p50_us": 1.0,
        "p80_us": 1.0,
        "ratio": 2.0,
        "device": "cpu",
        "device_name": "Some CPU",
        "threads": 3,
        "torch": "2.99",
        "commit": "abc1234",
        "utc": "2030-01-01T00:00:00+00:00",
        **changes,
    }


def write(folder: Path, name: str, *lines: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder.parent


def test_readme_is_what_the_ledgers_say(shown):
    assert shown == readme.section(RESULTS), "run `make readme`"


def test_figures_are_what_the_ledgers_say():
    assert readme.stale(RESULTS, ROOT / readme.PLOTS) == ([], []), "run `make readme`"


def test_every_number_is_from_the_ledger(shown):
    """Taken apart here without the code that wrote it."""
    known = set()
    for run in evidence.newest(RESULTS):
        said = [run.op, run.machine, "20th", "0", *(str(len(c)) for c in run.refused.values())]
        said += [words for source in run.sources for words in (source.command, source.date)]
        ratios: dict[str, list[float]] = {}
        for record in run.records:
            keys = ("case", "device_name", "torch", "commit", "triton", "cuda", "driver")
            said += [str(record[key]) for key in keys]
            said.append(f"{record['threads']} threads")
            if record["counted"] and record["ratio"]:
                ratios.setdefault(record["provider"], []).append(record["ratio"])
                for other in run.records:
                    if (other["provider"], other["case"]) == ("fp32", record["case"]):
                        ratio = other["p20_us"] / record["p20_us"]
                        ratios.setdefault(f"{record['provider']} to fp32", []).append(ratio)
        for values in ratios.values():
            product = 1.0
            for value in values:
                product *= value ** (1 / len(values))
            said += [
                str(len(values)),
                *(f"{value:.{d}f}" for value in [*values, product] for d in (0, 1, 2)),
            ]
        known |= {number for words in said for number in numbers(words)}
    assert set(numbers(shown)) <= known
    assert len(numbers(shown)) > 50


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)*", text)


def test_an_edit_by_hand_is_found(shown):
    text = (ROOT / "README.md").read_text()
    number = next(n for n in numbers(shown) if "." in n)
    place = text.index(readme.BEGIN)
    edited = text[:place] + text[place:].replace(number, "99.9", 1)
    assert readme.replaced(edited, readme.section(RESULTS)) != edited
    assert readme.replaced(text, readme.section(RESULTS)) == text


def test_a_readme_without_the_comments_is_refused():
    with pytest.raises(ValueError, match=r"README\.md lacks <!-- performance"):
        readme.replaced("# amp_ext\n", "")


def test_check_says_what_is_not_true_and_writes_nothing(tmp_path, capsys):
    text = (ROOT / "README.md").read_bytes()
    assert readme.main(["--check"]) == 0
    others = write(tmp_path / "a-cpu", "1.jsonl", line())
    assert readme.main(["--check", "--results", str(others)]) == 1
    assert f"{ROOT / 'README.md'} is not what the ledgers say" in capsys.readouterr().out
    assert (ROOT / "README.md").read_bytes() == text


def test_a_gpu_has_its_part_as_soon_as_it_has_a_ledger(tmp_path):
    results = write(tmp_path / "a-cpu", "1.jsonl", line())
    before = readme.section(results)
    assert readme.NO_GPU in before
    gpu = line(device="cuda", device_name="Some GPU", provider="triton", cuda="13.0")
    write(tmp_path / "some-gpu", "1.jsonl", gpu)
    after = readme.section(results)
    assert readme.NO_GPU not in after
    assert after.index("### GPU: Some GPU") < after.index("### CPU: Some CPU")
    row = "| unscale | triton | torch | 1 | 2.00 | 2.00 (7 x 7) | 2.00 (7 x 7) |"
    assert row in after.splitlines()
    assert "torch 2.99, cuda 13.0, commit abc1234, 2030-01-01" in after


NEWER = "2031-01-01T00:00:00+00:00"
QUICK = "python bench/run.py unscale --quick --device cpu"


def ratios_of(results: Path, op: str = "unscale", quick: bool = False) -> dict[str, float]:
    (run,) = (run for run in evidence.newest(results, quick) if run.op == op)
    return run.ratios["cpu"].cases


def test_of_each_case_the_newest_measurement_counts(tmp_path):
    """Whatever its file is called, and whatever else was measured with it."""
    older = line(), line(case="8 x 8", ratio=8.0), line(op="cast", ratio=5.0)
    results = write(tmp_path / "cpu", "b.jsonl", *older)
    write(tmp_path / "cpu", "a.jsonl", line(ratio=3.0, utc=NEWER), line(ratio=4.0, utc=NEWER))
    assert ratios_of(results) == {"7 x 7": 4.0, "8 x 8": 8.0}
    assert ratios_of(results, "cast") == {"7 x 7": 5.0}


def test_a_failure_takes_the_place_of_an_older_ratio(tmp_path):
    wrong = line(ratio=None, error="CheckError: wrong", utc=NEWER)
    (run,) = evidence.newest(write(tmp_path / "cpu", "a.jsonl", line(), wrong))
    assert (run.ratios, run.refused) == ({}, {"cpu": ["7 x 7"]})


def test_the_lines_of_a_case_are_of_one_run(tmp_path):
    """A provider that took part the time before, but not the last one, is not shown."""
    compiled = line(provider="compile", ratio=7.0)
    results = write(tmp_path / "cpu", "a.jsonl", line(), compiled, line(utc=NEWER))
    (run,) = evidence.newest(results)
    assert [record["provider"] for record in run.measured] == ["cpu"]


def test_quick_runs_count_where_there_is_no_other(tmp_path):
    results = write(tmp_path / "cpu", "a.jsonl", line(), line(ratio=9.0, utc=NEWER, command=QUICK))
    assert ratios_of(results) == ratios_of(results, quick=True) == {"7 x 7": 2.0}
    only = write(tmp_path / "other/cpu", "a.jsonl", line(ratio=9.0, command=QUICK))
    assert evidence.newest(only) == []
    assert ratios_of(only, quick=True) == {"7 x 7": 9.0}


def test_a_whole_table_takes_the_place_of_older_cases(tmp_path):
    """Of those that are not in it any more; one that is filtered does not."""
    limit = {"limit": True, "ratio": None, "provider": "copy", "case": "copy"}
    gone, kept = line(case="8 x 8", ratio=8.0), line(utc=NEWER)
    results = write(tmp_path / "cpu", "a.jsonl", gone, line(utc=NEWER, **limit), kept)
    assert ratios_of(results) == {"7 x 7": 2.0}
    part = {"command": "python bench/run.py unscale --device cpu --filter 7", "utc": NEWER}
    results = write(tmp_path / "b/cpu", "a.jsonl", gone, line(**limit, **part), line(**part))
    assert ratios_of(results) == {"7 x 7": 2.0, "8 x 8": 8.0}


def test_fp32_has_a_row_of_its_own(tmp_path):
    fp32 = line(provider="fp32", ratio=None, p20_us=3.0)
    results = write(tmp_path / "cpu", "a.jsonl", line(), fp32)
    row = "| unscale | cpu | torch, FP32 | 1 | 3.00 | 3.00 (7 x 7) | 3.00 (7 x 7) |"
    assert row in readme.section(results).splitlines()


def test_runs_without_a_baseline_do_not_count(tmp_path):
    alone = line(ratio=None, utc=NEWER, command="python bench/run.py unscale --device cpu --ours")
    assert ratios_of(write(tmp_path / "cpu", "a.jsonl", line(), alone)) == {"7 x 7": 2.0}


def test_commands_are_shown_without_their_files(tmp_path):
    words = "python bench/run.py unscale --json '/a b/c.jsonl' --quick --results /d"
    results = write(tmp_path / "cpu", "a.jsonl", line(command=words), line(case="8 x 8"))
    (run,) = evidence.newest(results, quick=True)
    derived = "python bench/run.py unscale --device cpu"
    shown = ["python bench/run.py unscale --quick", derived]
    assert [source.command for source in run.sources] == shown


def test_refused_and_uncounted_cases_have_no_part(tmp_path):
    results = write(
        tmp_path / "cpu",
        "a.jsonl",
        line(case="copy", limit=True, provider="copy", ratio=None),
        line(),
        line(case="8 x 8", ratio=8.0),
        line(case="9 x 9", ratio=None, error="CheckError: wrong"),
        line(case="1 x 1", ratio=0.01, counted=False),
    )
    row = "| unscale | cpu | torch | 2, 1 refused | 4.00 | 2.00 (7 x 7) | 8.00 (8 x 8) |"
    assert row in readme.section(results).splitlines()


def test_a_backend_that_is_always_wrong_has_a_row_of_its_own(tmp_path):
    wrong = line(provider="triton", ratio=None, error="CheckError: wrong")
    lines = readme.section(write(tmp_path / "a", "a.jsonl", line(), wrong)).splitlines()
    assert "| unscale | cpu | torch | 1 | 2.00 | 2.00 (7 x 7) | 2.00 (7 x 7) |" in lines
    assert "| unscale | triton |  | 0, 1 refused |  |  |  |" in lines


def test_of_the_limits_the_last_is_shown(tmp_path):
    limit = {"limit": True, "ratio": None, "provider": "copy", "dtype": "fp32"}
    older, newer = line(case="copy", **limit), line(case="mul_", utc=NEWER, **limit)
    (run,) = evidence.newest(write(tmp_path / "cpu", "a.jsonl", older, newer))
    assert [record["case"] for record in run.limits] == ["mul_"]


def test_the_digest_in_a_drawn_figure_is_found_again(tmp_path):
    pytest.importorskip("matplotlib")
    import draw

    bytes_read = {"bytes": 10, "gb_per_s": 3.0}
    results = write(tmp_path / "cpu", "a.jsonl", line(**bytes_read))
    ((_, figure),) = readme.figures(results)
    path = tmp_path / "plots/cpu.bandwidth.svg"
    assert readme.stale(results, path.parent)[0] == [(path, figure)]
    draw.write(figure, path)
    once = path.read_bytes()
    assert readme.stale(results, path.parent) == ([], [])
    draw.write(figure, path)
    assert path.read_bytes() == once
    write(tmp_path / "cpu", "a.jsonl", line(bytes=10, gb_per_s=4.0))
    assert [changed for changed, _ in readme.stale(results, path.parent)[0]] == [path]
    (path.parent / "gone.steps.svg").touch()
    assert readme.stale(results, path.parent)[1] == [path.parent / "gone.steps.svg"]
