"""The loss scale over a training with overflows put in: its lines, their command, the figure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
OPTIONS = ["--device", "cpu", "--steps", "12", "--overflows", "5", "99"]


@pytest.fixture
def history() -> Iterator[ModuleType]:
    import history

    threads = torch.get_num_threads()
    yield history
    torch.set_num_threads(threads)


def lines(ledger: Path) -> list[dict]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def test_history_is_kept_and_drawn(history, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    import plot

    ledger = tmp_path / "some-cpu/1.jsonl"
    assert history.main([*OPTIONS, "--json", str(ledger)]) == 0
    ours, theirs = lines(ledger)
    assert (ours["provider"], theirs["provider"]) == ("amp_ext", "torch")
    assert ours["overflows"] == [5]
    assert ours["skipped"] == [5]
    assert ours["scales"] == [2.0**14] * 5 + [2.0**13] * 7
    assert plot.main(["--results", str(ledger), "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for kind in ("roofline", "bandwidth", "heatmap", "steps"):
        assert f"{kind}: left out, " in output
    for suffix in ("png", "svg"):
        assert (tmp_path / f"some-cpu.history.{suffix}").stat().st_size > 10_000


def test_the_recorded_command_writes_the_lines_again(history, tmp_path):
    ledger = tmp_path / "a folder/1.jsonl"
    options = [*OPTIONS, "--json", str(ledger)]
    history.main(options)
    ours, theirs = lines(ledger)
    python, program, *recorded = shlex.split(ours["command"])
    assert (python, program) == ("python", "bench/history.py")
    assert recorded == options
    history.main(recorded)
    undated = [{**line, "utc": None} for line in lines(ledger)]
    assert undated == 2 * [{**ours, "utc": None}, {**theirs, "utc": None}]


def test_no_way_to_train_can_be_chosen(history, tmp_path, capsys):
    with pytest.raises(SystemExit):
        history.main(["--json", str(tmp_path / "1.jsonl"), "--amp", "none"])
    assert "unrecognized arguments: --amp none" in capsys.readouterr().err


def test_lines_go_beside_the_measurements(history, tmp_path):
    assert history.main([*OPTIONS, "--results", str(tmp_path)]) == 0
    (ledger,) = tmp_path.rglob("*.jsonl")
    assert ledger.parent.name.startswith("cpu-")
    assert len(lines(ledger)) == 2
