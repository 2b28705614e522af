"""README's performance section says what the ledgers say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import evidence
    import figures
    import readme

    return SimpleNamespace(readme=readme, evidence=evidence, figures=figures)


@pytest.fixture
def shown(bench) -> str:
    """The section as it stands in README.md."""
    text = (ROOT / "README.md").read_text()
    return text.partition(bench.readme.BEGIN + "\n")[2].partition("\n" + bench.readme.END)[0]


def line(**changes: object) -> dict:
    """A ledger's line."""
    return {
        "op": "unscale",
        "case": "7 x 7",
        "provider": "amp_ext",
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


def test_readme_is_what_the_ledgers_say(bench, shown):
    assert shown == bench.readme.section(RESULTS), "run `make readme`"


def test_figures_are_what_the_ledgers_say(bench):
    assert bench.readme.stale(RESULTS, ROOT / bench.readme.PLOTS) == ([], []), "run `make readme`"


def test_every_number_is_from_the_ledger(bench, shown):
    """Taken apart here without the code that wrote it."""
    known = set()
    for run in bench.evidence.newest(RESULTS):
        said = [run.op, run.machine, run.command, run.latest[:10], "20th"]
        ratios: dict[str, list[float]] = {}
        for record in run.records:
            keys = ("case", "device_name", "torch", "commit", "triton", "cuda", "driver")
            said += [str(record[key]) for key in keys]
            said.append(f"{record['threads']} threads")
            if record["counted"] and record["ratio"]:
                ratios.setdefault(record["provider"], []).append(record["ratio"])
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


def test_an_edit_by_hand_is_found(bench, shown):
    text = (ROOT / "README.md").read_text()
    number = next(n for n in numbers(shown) if "." in n)
    place = text.index(bench.readme.BEGIN)
    edited = text[:place] + text[place:].replace(number, "99.9", 1)
    assert bench.readme.replaced(edited, bench.readme.section(RESULTS)) != edited
    assert bench.readme.replaced(text, bench.readme.section(RESULTS)) == text


def test_a_readme_without_the_comments_is_refused(bench):
    with pytest.raises(ValueError, match=r"README\.md lacks <!-- performance"):
        bench.readme.replaced("# amp_ext\n", "")


def test_a_gpu_has_its_part_as_soon_as_it_has_a_ledger(bench, tmp_path):
    results = write(tmp_path / "a-cpu", "1.jsonl", line())
    before = bench.readme.section(results)
    assert bench.readme.NO_GPU in before
    gpu = line(device="cuda", device_name="Some GPU", provider="triton", cuda="13.0")
    write(tmp_path / "some-gpu", "1.jsonl", gpu)
    after = bench.readme.section(results)
    assert bench.readme.NO_GPU not in after
    assert after.index("### GPU: Some GPU") < after.index("### CPU: Some CPU")
    row = "| unscale | triton | torch | 1 | 2.00 | 2.00 (7 x 7) | 2.00 (7 x 7) |"
    assert row in after.splitlines()
    assert "torch 2.99, cuda 13.0, commit abc1234, 2030-01-01" in after


def test_the_newest_of_a_machine_and_op_counts(bench, tmp_path):
    newer = {"utc": "2031-01-01T00:00:00+00:00", "commit": "fff9999"}
    results = write(tmp_path / "cpu", "b.jsonl", line(), line(op="cast", ratio=5.0))
    write(tmp_path / "cpu", "a.jsonl", line(ratio=3.0, **newer), line(ratio=4.0, **newer))
    quick = {"utc": "2032-01-01T00:00:00+00:00", "command": "python bench/run.py unscale --quick"}
    write(tmp_path / "cpu", "c.jsonl", line(ratio=9.0, **quick))
    runs = {run.op: run for run in bench.evidence.newest(results)}
    assert runs["unscale"].ratios["amp_ext"].cases == {"7 x 7": 4.0}, "its last line"
    assert runs["cast"].ratios["amp_ext"].mean == pytest.approx(5.0)
    only = write(tmp_path / "other/cpu", "c.jsonl", line(ratio=9.0, **quick))
    assert bench.evidence.newest(only) == []
    assert len(bench.evidence.newest(only, quick=True)) == 1


def test_commands_are_shown_without_their_files(bench, tmp_path):
    words = "python bench/run.py unscale --json '/a b/c.jsonl' --quick --results /d"
    results = write(tmp_path / "cpu", "a.jsonl", line(command=words), line(case="8 x 8"))
    (run,) = bench.evidence.newest(results, quick=True)
    derived = "python bench/run.py unscale --device cpu"
    assert run.command == f"python bench/run.py unscale --quick; {derived}"


def test_refused_and_uncounted_cases_have_no_part(bench, tmp_path):
    results = write(
        tmp_path / "cpu",
        "a.jsonl",
        line(case="limit: copy", provider="copy", ratio=None),
        line(),
        line(case="8 x 8", ratio=8.0),
        line(case="9 x 9", ratio=None, error="CheckError: wrong"),
        line(case="1 x 1", ratio=0.01, counted=False),
    )
    row = "| unscale | amp_ext | torch | 2, 1 refused | 4.00 | 2.00 (7 x 7) | 8.00 (8 x 8) |"
    assert row in bench.readme.section(results).splitlines()


def test_the_digest_in_a_drawn_figure_is_found_again(bench, tmp_path):
    pytest.importorskip("matplotlib")
    import draw

    bytes_read = {"bytes": 10, "gb_per_s": 3.0}
    results = write(tmp_path / "cpu", "a.jsonl", line(**bytes_read))
    ((_, figure),) = bench.readme.figures(results)
    path = tmp_path / "plots/cpu.bandwidth.svg"
    assert bench.readme.stale(results, path.parent)[0] == [(path, figure)]
    draw.write(figure, path)
    once = path.read_bytes()
    assert bench.readme.stale(results, path.parent) == ([], [])
    draw.write(figure, path)
    assert path.read_bytes() == once
    write(tmp_path / "cpu", "a.jsonl", line(bytes=10, gb_per_s=4.0))
    assert [changed for changed, _ in bench.readme.stale(results, path.parent)[0]] == [path]
    (path.parent / "gone.steps.svg").touch()
    assert bench.readme.stale(results, path.parent)[1] == [path.parent / "gone.steps.svg"]
