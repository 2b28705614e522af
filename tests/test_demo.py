"""The demo with tiny settings, and the network that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib: pip install '.[demo]'")
pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm: pip install '.[demo]'")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks gain nothing from more threads, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCH)
    import demo

    return demo


@pytest.fixture
def checkerboard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCH)
    from workloads import checkerboard

    return checkerboard


def test_target_has_eight_fields_a_side(checkerboard):
    target = checkerboard.checkerboard(checkerboard.coordinates(32))[0, 0]
    fields = target.view(8, 4, 8, 4)
    assert (fields == fields[:, :1, :, :1]).all()
    corners = fields[:, 0, :, 0]
    assert corners[0, 0] == 0
    assert (corners[1:] != corners[:-1]).all()
    assert (corners[:, 1:] != corners[:, :-1]).all()


def test_network_learns_in_fp32(checkerboard):
    run = checkerboard.training("none", torch.device("cpu"), 8)
    losses = [record.loss for record in run.steps(60)]
    assert losses[-1] < 0.2 < losses[0]
    assert run.output().shape == (8, 8)
    assert run.drawing(40).shape == (40, 40)


@pytest.mark.parametrize("amp", ["torch", "amp_ext"])
def test_overflow_is_recorded_as_a_skipped_step(checkerboard, amp):
    run = checkerboard.training(amp, torch.device("cpu"), 8, init_scale=2.0**40)
    before = [parameter.detach().clone() for parameter in run.network.parameters()]
    (record,) = run.steps(1)
    assert record.skipped
    assert record.scale == 2.0**40
    assert all(a.equal(b) for a, b in zip(before, run.network.parameters(), strict=True))


def test_workload_prints_figures(checkerboard, capsys):
    checkerboard.main(["--amp", "amp_ext", "--device", "cpu", "--size", "8", "--steps", "3"])
    line = capsys.readouterr().out
    for word in ("8x8, amp_ext, cpu: 3 steps", "ms a step", "loss 0.", "skipped", "scale"):
        assert word in line


def test_demo_prints_a_table_and_draws(demo, tmp_path, capsys):
    picture = tmp_path / "demo.png"
    sizes = ["--size", "8", "--steps", "6", "--torch-steps", "2"]
    demo.main(["--device", "cpu", *sizes, "--out", str(picture)])
    output = capsys.readouterr()
    lines = output.out.splitlines()
    heading = next(line for line in lines if "final loss" in line)
    ours, theirs = (line.split() for line in lines[lines.index(heading) + 1 :][:2])
    assert "step time ms" in heading
    assert ours[:2] == ["amp_ext", "6"]
    assert theirs[:2] == ["torch.amp", "2"]
    assert "torch.amp was stopped after 2 of 6 steps" in output.out
    assert "has not learned" in output.out
    assert "8/8" in output.err, "the progress bar counts the steps of both legs"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_demo_stops_at_its_time_limit(demo, tmp_path, capsys):
    sizes = ["--size", "8", "--steps", "500", "--torch-steps", "1", "--seconds", "0"]
    demo.main(["--device", "cpu", *sizes, "--out", str(tmp_path / "demo.png")])
    assert "amp_ext reached the time limit after 1 of 500 steps" in capsys.readouterr().out
