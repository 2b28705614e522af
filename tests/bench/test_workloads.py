"""Test that the seed programs and the demo train in every kind of precision."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import threads

pytest.importorskip("tqdm", reason="workloads show their progress with tqdm: pip install '.[demo]'")

FIGURES = re.compile(
    r"(?P<name>.+), (?:FP32|torch\.amp FP16|amp_ext FP16), cpu: (?P<steps>\d+) steps, "
    r"[\d.,]+ ms a step \(median\), loss (?P<loss>[\d.]+), "
    r"(accuracy (?P<accuracy>[\d.]+)% of 360, )?"
    r"(?P<skipped>\d+) skipped, scale (?P<scale>[\d.]+)"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small networks gain nothing from more."""
    with threads(1):
        yield


def run(capsys, name: str, amp: str, *options: object) -> tuple[list[str], dict[str, str]]:
    """Return the lines that a program prints, and the figures of the last one."""
    program = importlib.import_module(f"workloads.{name}")
    program.main(["--amp", amp, "--device", "cpu", *map(str, options)])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, FIGURES.fullmatch(last).groupdict()


@pytest.mark.parametrize("amp", ["none", "torch", "amp_ext"])
def test_the_checkerboard_is_learned(capsys, amp: str) -> None:
    lines, read = run(capsys, "checkerboard", amp, "--size", 8, "--steps", 60)
    assert (lines, read["name"], read["steps"]) == ([], "checkerboard 8x8", "60")
    assert float(read["loss"]) < 0.2, "grey has 0.25"
    scale = 1.0 if amp == "none" else 65536.0 / 2 ** int(read["skipped"])
    assert float(read["scale"]) == scale, "nothing can have grown in so few steps"


def test_the_regression_runs_epochs(capsys) -> None:
    """A few steps lower the mean square of y, with mean 10 and deviation 5, a little."""
    lines, read = run(capsys, "regression", "amp_ext", "--epochs", 2)
    assert [line.split(":")[0] for line in lines] == ["epoch 1, batch 100", "epoch 2, batch 100"]
    assert int(read["steps"]) == 2 * 157
    assert float(read["loss"]) < 125


def test_digits_without_mnist_are_scikit_learns(tmp_path: Path, capsys) -> None:
    pytest.importorskip("sklearn", reason="small digits are scikit-learn's: pip install '.[demo]'")
    lines, read = run(capsys, "digits", "amp_ext", "--data", tmp_path)
    assert lines == ["images: scikit-learn's digits, 8x8 enlarged to 28x28, 1437 to train on"]
    assert float(read["accuracy"]) > 60, "of ten digits, guessing gets 10% right"


def test_the_demo_prints_a_table_and_draws(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws: pip install '.[demo]'")
    import demo

    picture = tmp_path / "demo.png"
    sizes = ["--size", "8", "--steps", "6", "--torch-steps", "2"]
    demo.main(["--device", "cpu", *sizes, "--out", str(picture)])
    output = capsys.readouterr()
    heading, _, *lines = output.out.splitlines()[1:]
    assert "ms a step" in heading
    fp32, theirs, _ = (line.split() for line in lines[:3])
    assert fp32[:2] == ["FP32", "6"]
    assert fp32[-2:] == ["0", "1"], "FP32 skips nothing and has no scale"
    assert theirs[:3] == ["torch.amp", "FP16", "2"]
    assert "torch.amp FP16 was stopped after 2 of 6 steps: FP16" in output.out
    assert "amp_ext FP16 has NOT learned the checkerboard: loss " in output.out
    assert "14/14" in output.err, "the progress bar counts all steps"
    assert picture.read_bytes().startswith(b"\x89PNG")
