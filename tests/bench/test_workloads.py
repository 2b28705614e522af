"""The seed programs for a few steps under every kind of precision."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"

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
    """Small networks gain nothing from more threads, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys, name: str, amp: str, *options: object) -> tuple[list[str], dict[str, str]]:
    """The lines that a program prints, and the figures of the last one."""
    program = importlib.import_module(f"workloads.{name}")
    program.main(["--amp", amp, "--device", "cpu", *map(str, options)])
    *lines, last = capsys.readouterr().out.splitlines()
    match = FIGURES.fullmatch(last)
    assert match, last
    read = match.groupdict()
    assert read["amp"] == AMPS[amp]
    assert float(read["ms"]) > 0
    skipped = int(read["skipped"])
    assert skipped < int(read["steps"])
    scale = 1.0 if amp == "none" else 65536.0 / 2**skipped
    assert float(read["scale"]) == scale, "nothing can have grown in so few steps"
    return lines, read


@pytest.mark.parametrize("amp", AMPS)
def test_checkerboard(capsys, amp):
    lines, read = run(capsys, "checkerboard", amp, "--size", 8, "--steps", 60)
    assert lines == []
    assert (read["name"], read["steps"]) == ("checkerboard 8x8", "60")
    assert float(read["loss"]) < 0.2, "grey has 0.25"


def test_target_has_eight_fields_a_side():
    from workloads.checkerboard import checkerboard, coordinates

    fields = checkerboard(coordinates(32))[0, 0].view(8, 4, 8, 4)
    assert (fields == fields[:, :1, :, :1]).all()
    corners = fields[:, 0, :, 0]
    assert corners[0, 0] == 0
    assert (corners[1:] != corners[:-1]).all()
    assert (corners[:, 1:] != corners[:, :-1]).all()


@pytest.mark.parametrize("amp", AMPS)
def test_regression(capsys, amp):
    lines, read = run(capsys, "regression", amp, "--epochs", 2)
    assert [line.split(":")[0] for line in lines] == ["epoch 1, batch 100", "epoch 2, batch 100"]
    assert int(read["steps"]) == 2 * 157
    # y is 10 with a deviation of 5: a mean square of 125, which a few steps bring down a little.
    assert float(read["loss"]) < 125


@pytest.mark.parametrize("amp", AMPS)
def test_digits_without_mnist_are_scikit_learns(tmp_path, capsys, amp):
    pytest.importorskip("sklearn", reason="small digits are scikit-learn's: pip install '.[demo]'")
    lines, read = run(capsys, "digits", amp, "--data", tmp_path)
    assert lines == ["images: scikit-learn's digits, 8x8 enlarged to 28x28, 1437 to train on"]
    assert (int(read["steps"]), int(read["tested"])) == (2 * 23, 360)
    assert float(read["accuracy"]) > 60, "of ten digits, guessing gets 10% right"


class MNIST:
    """In torchvision's place: 130 images (50 to test with) whose brightness is their label."""

    def __init__(self, root: str, train: bool = True) -> None:
        assert (Path(root) / "MNIST").is_dir()
        count = 130 if train else 50
        self.targets = torch.arange(count) % 10
        self.data = (self.targets * 25).to(torch.uint8).view(-1, 1, 1).expand(-1, 28, 28)


def test_digits_with_mnist(tmp_path, capsys, monkeypatch):
    package, datasets = map(types.ModuleType, ("torchvision", "torchvision.datasets"))
    datasets.MNIST = MNIST
    for module in (package, datasets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "MNIST").mkdir()
    lines, read = run(capsys, "digits", "amp_ext", "--data", tmp_path)
    assert lines == ["images: MNIST, 130 to train on"]
    assert (int(read["steps"]), int(read["tested"])) == (2 * 3, 50)


@pytest.mark.full
@pytest.mark.parametrize("name", ["checkerboard", "regression", "digits"])
def test_runs_as_a_script(name):
    script = BENCH / "workloads" / f"{name}.py"
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--amp {none,torch,amp_ext}" in run.stdout
