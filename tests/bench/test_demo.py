"""The demo with tiny settings: its table, whether it has learned, and its picture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
def demo():
    import demo

    return demo


def test_demo_prints_a_table_and_draws(demo, tmp_path, capsys):
    picture = tmp_path / "demo.png"
    sizes = ["--size", "8", "--steps", "6", "--torch-steps", "2"]
    demo.main(["--device", "cpu", *sizes, "--out", str(picture)])
    output = capsys.readouterr()
    heading, *lines = output.out.splitlines()[1:]
    assert "ms a step" in heading
    assert "final scale" in heading
    fp32, theirs, ours = (line.split() for line in lines[:3])
    assert fp32[:2] == ["FP32", "6"]
    assert fp32[-2:] == ["0", "1"], "FP32 skips nothing and has no scale"
    assert theirs[:3] == ["torch.amp", "FP16", "2"]
    assert ours[:3] == ["amp_ext", "FP16", "6"]
    assert ours[-1] in ("65536", "32768", "16384"), "the scale starts at 65536 and may be halved"
    assert "torch.amp FP16 was stopped after 2 of 6 steps: FP16" in output.out
    for name in ("FP32", "amp_ext FP16"):
        assert f"{name} has NOT learned the checkerboard: loss " in output.out
    assert "14/14" in output.err, "the progress bar counts the steps of all legs"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_demo_stops_at_its_time_limit(demo, tmp_path, capsys):
    sizes = ["--size", "8", "--steps", "500", "--torch-steps", "1", "--seconds", "0"]
    demo.main(["--device", "cpu", *sizes, "--out", str(tmp_path / "demo.png")])
    assert "amp_ext FP16 reached the time limit after 1 of 500 steps" in capsys.readouterr().out


def leg(demo, losses: list[float]):
    """A finished training in FP32 with these losses."""
    trainer = demo.training("none", torch.device("cpu"), 8)
    records = [demo.StepRecord(loss, 1.0, False, 1.0) for loss in losses]
    return demo.Leg(trainer, len(losses), records)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([0.2, *25 * [0.099]], "FP32 has learned the checkerboard: loss 0.0990."),
        (25 * [0.1], "FP32 has NOT learned the checkerboard: loss 0.1000."),
        ([*24 * [0.01], 0.5], "FP32 has learned the checkerboard: loss 0.0100."),
    ],
    ids=["learned", "on the border", "spike at the end"],
)
def test_whether_it_has_learned(demo, losses, words):
    assert demo.outcome(leg(demo, losses), len(losses)) == words


def test_legs_start_from_the_same_network_and_take_turns(demo, monkeypatch):
    order = []
    step = demo.Trainer.step

    def noted(trainer):
        order.append(trainer)
        return step(trainer)

    monkeypatch.setattr(demo.Trainer, "step", noted)
    device = torch.device("cpu")
    legs = [demo.Leg(demo.training(amp, device, 8), n) for amp, n in (("none", 3), ("torch", 1))]
    first, second = (leg.trainer for leg in legs)
    pairs = zip(first.network.parameters(), second.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    demo.train(legs, seconds=60)
    assert order == [first, second, first, first]
    assert [len(leg.records) for leg in legs] == [3, 1]
