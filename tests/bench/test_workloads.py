"""Test that the seed programs and the demo train in every kind of precision."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from workloads.networks import GPT2, ResNet50

pytest.importorskip("tqdm", reason="workloads show their progress with tqdm: pip install '.[demo]'")

AMPS = {"none": "FP32", "torch": "torch.amp FP16", "amp_ext": "amp_ext FP16"}
FIGURES = re.compile(
    r"(?P<name>.+), (?P<amp>FP32|torch\.amp FP16|amp_ext FP16), cpu: (?P<steps>\d+) steps, "
    r"(?P<ms>[\d.]+) ms a step \(median\), loss (?P<loss>[\d.]+|nan|inf), "
    r"(accuracy (?P<accuracy>[\d.]+)% of (?P<tested>\d+), )?"
    r"(?P<skipped>\d+) skipped, scale (?P<scale>[\d.]+)"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small networks gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys, name: str, amp: str, *options: object) -> tuple[list[str], dict[str, str]]:
    """Return the lines that a program prints, and the figures of the last one."""
    program = importlib.import_module(f"workloads.{name}")
    program.main(["--amp", amp, "--device", "cpu", *map(str, options)])
    *lines, last = capsys.readouterr().out.splitlines()
    read = FIGURES.fullmatch(last).groupdict()
    assert read["amp"] == AMPS[amp]
    assert float(read["ms"]) > 0
    scale = 1.0 if amp == "none" else 65536.0 / 2 ** int(read["skipped"])
    assert float(read["scale"]) == scale, "nothing can have grown in so few steps"
    return lines, read


@pytest.mark.parametrize("amp", AMPS)
def test_the_checkerboard_is_learned(capsys, amp: str) -> None:
    lines, read = run(capsys, "checkerboard", amp, "--size", 8, "--steps", 60)
    assert (lines, read["name"], read["steps"]) == ([], "checkerboard 8x8", "60")
    assert float(read["loss"]) < 0.2, "grey has 0.25"


@pytest.mark.parametrize("amp", AMPS)
def test_the_regression_runs_epochs(capsys, amp: str) -> None:
    lines, read = run(capsys, "regression", amp, "--epochs", 2)
    assert [line.split(":")[0] for line in lines] == ["epoch 1, batch 100", "epoch 2, batch 100"]
    assert int(read["steps"]) == 2 * 157
    # y is 10 with a deviation of 5: a mean square of 125. A few steps lower it a little.
    assert float(read["loss"]) < 125


@pytest.mark.parametrize("amp", AMPS)
def test_digits_without_mnist_are_scikit_learns(tmp_path: Path, capsys, amp: str) -> None:
    pytest.importorskip("sklearn", reason="small digits are scikit-learn's: pip install '.[demo]'")
    lines, read = run(capsys, "digits", amp, "--data", tmp_path)
    assert lines == ["images: scikit-learn's digits, 8x8 enlarged to 28x28, 1437 to train on"]
    assert (int(read["steps"]), int(read["tested"])) == (2 * 23, 360)
    assert float(read["accuracy"]) > 60, "of ten digits, guessing gets 10% right"


class MNIST:
    """Replace torchvision's MNIST by 130 images (50 to test with), as bright as their label."""

    def __init__(self, root: str, train: bool = True) -> None:
        assert (Path(root) / "MNIST").is_dir()
        self.targets = torch.arange(130 if train else 50) % 10
        self.data = (self.targets * 25).to(torch.uint8).view(-1, 1, 1).expand(-1, 28, 28)


def test_digits_are_mnists_where_it_is_there(tmp_path: Path, capsys, monkeypatch) -> None:
    package, datasets = map(types.ModuleType, ("torchvision", "torchvision.datasets"))
    datasets.MNIST = MNIST
    for module in (package, datasets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "MNIST").mkdir()
    lines, read = run(capsys, "digits", "amp_ext", "--data", tmp_path)
    assert lines == ["images: MNIST, 130 to train on"]
    assert (int(read["steps"]), int(read["tested"])) == (2 * 3, 50)


def test_whole_networks_have_their_parameters() -> None:
    for sizes, count in ((GPT2(), 124_439_808), (ResNet50(), 25_557_032)):
        with torch.device("meta"):
            assert sum(p.numel() for p in sizes.network().parameters()) == count


# ---- the demo ----------------------------------------------------------------------------------


def test_the_demo_prints_a_table_and_draws(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws: pip install '.[demo]'")
    import demo

    picture = tmp_path / "demo.png"
    sizes = ["--size", "8", "--steps", "6", "--torch-steps", "2"]
    demo.main(["--device", "cpu", *sizes, "--out", str(picture)])
    output = capsys.readouterr()
    heading, _, *lines = output.out.splitlines()[1:]
    assert "ms a step" in heading
    fp32, theirs, ours = (line.split() for line in lines[:3])
    assert fp32[:2] == ["FP32", "6"]
    assert fp32[-2:] == ["0", "1"], "FP32 skips nothing and has no scale"
    assert theirs[:3] == ["torch.amp", "FP16", "2"]
    assert ours[-1] in ("65536", "32768", "16384"), "the scale starts at 65536 and may be halved"
    assert "torch.amp FP16 was stopped after 2 of 6 steps: FP16" in output.out
    for name in ("FP32", "amp_ext FP16"):
        assert f"{name} has NOT learned the checkerboard: loss " in output.out
    assert "14/14" in output.err, "the progress bar counts all steps"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([0.2, *25 * [0.099]], "FP32 has learned the checkerboard: loss 0.0990."),
        (25 * [0.1], "FP32 has NOT learned the checkerboard: loss 0.1000."),
        ([*24 * [0.01], 0.5], "FP32 has learned the checkerboard: loss 0.0100."),
    ],
)
def test_a_median_of_losses_tells_whether_it_has_learned(losses: list[float], words: str) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws: pip install '.[demo]'")
    import demo

    trainer = demo.training("none", torch.device("cpu"), 8)
    leg = demo.Leg(trainer, len(losses), [demo.StepRecord(x, 1.0, False, 1.0) for x in losses])
    assert demo.outcome(leg, len(losses)) == words
