"""The seed programs for a few steps under every kind of precision."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
CPU = torch.device("cpu")

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


@pytest.fixture
def workloads():
    from workloads import checkerboard, common, digits, regression

    names = {"checkerboard": checkerboard, "digits": digits, "regression": regression}
    return types.SimpleNamespace(common=common, **names)


def figures(output: str) -> dict[str, str]:
    """The last line of stdout, read."""
    line = output.splitlines()[-1]
    match = FIGURES.fullmatch(line)
    assert match, line
    return match.groupdict()


def check(read: dict[str, str], amp: str, steps: int) -> None:
    assert read["amp"] == AMPS[amp]
    assert int(read["steps"]) == steps
    assert float(read["ms"]) > 0
    assert 0 < float(read["loss"]) < 1000
    skipped = int(read["skipped"])
    assert skipped < steps
    scale = 1.0 if amp == "none" else 65536.0 / 2**skipped
    assert float(read["scale"]) == scale, "nothing can have grown in so few steps"


# ---- checkerboard ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [[], ["--script"]], ids=["eager", "TorchScript"])
@pytest.mark.parametrize("amp", AMPS)
def test_checkerboard(workloads, capsys, amp, script):
    options = ["--amp", amp, "--device", "cpu", "--size", "8", "--steps", "4"]
    workloads.checkerboard.main([*options, *script])
    output = capsys.readouterr()
    assert "4/4" in output.err
    assert len(output.out.splitlines()) == 1
    read = figures(output.out)
    check(read, amp, 4)
    assert read["name"] == f"checkerboard 8x8{' TorchScript' if script else ''}"


def test_target_has_eight_fields_a_side(workloads):
    board = workloads.checkerboard
    target = board.checkerboard(board.coordinates(32))[0, 0]
    fields = target.view(8, 4, 8, 4)
    assert (fields == fields[:, :1, :, :1]).all()
    corners = fields[:, 0, :, 0]
    assert corners[0, 0] == 0
    assert (corners[1:] != corners[:-1]).all()
    assert (corners[:, 1:] != corners[:, :-1]).all()


def test_network_learns_in_fp32(workloads):
    run = workloads.checkerboard.training("none", CPU, 8)
    losses = [record.loss for record in run.steps(60)]
    assert losses[-1] < 0.2 < losses[0]
    assert run.predict(run.inputs).shape == (1, 1, 8, 8)


# ---- regression --------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", AMPS)
def test_regression(workloads, capsys, amp):
    workloads.regression.main(["--amp", amp, "--device", "cpu", "--steps", "103"])
    output = capsys.readouterr()
    line, _ = output.out.splitlines()
    assert re.fullmatch(r"epoch 1, batch 100: loss \d+\.\d{4}", line)
    assert "103/103" in output.err
    read = figures(output.out)
    check(read, amp, 103)
    # y is 10 with a deviation of 5: a mean square of 125, which 103 steps bring down a little.
    assert float(read["loss"]) < 125


def test_regression_has_ten_epochs_of_157_batches(workloads, capsys):
    data = workloads.regression.Noise()
    assert len(data) == 10_000
    features, target = data[3]
    assert (features.shape, target.shape) == ((10,), (1,))
    # Six standard errors of the mean and of the deviation of 10,000 normal numbers.
    assert abs(data.targets.mean().item() - 10) < 6 * 5 / 100
    assert abs(data.targets.std().item() - 5) < 6 * 5 / 2**0.5 / 100
    assert abs(data.features.mean().item()) < 6 / 100_000**0.5

    workloads.regression.main(["--amp", "none", "--device", "cpu"])
    *lines, _ = output = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"epoch {epoch}, batch 100" for epoch in range(1, 11)
    ]
    read = figures(output[-1])
    assert int(read["steps"]) == 1570
    # The noise's variance is 25; a batch of 64 shows it with a deviation of 25 * (2 / 64)**0.5.
    assert float(read["loss"]) < 25 + 6 * 4.4


# ---- digits ------------------------------------------------------------------------------------


def small_digits() -> None:
    pytest.importorskip("sklearn", reason="small digits are scikit-learn's: pip install '.[demo]'")


@pytest.mark.parametrize("amp", AMPS)
def test_digits_without_mnist_are_scikit_learns(workloads, tmp_path, capsys, amp):
    small_digits()
    workloads.digits.main(["--amp", amp, "--device", "cpu", "--data", str(tmp_path)])
    output = capsys.readouterr().out
    first, _ = output.splitlines()
    reason = f"no MNIST under {tmp_path}"
    assert first == (
        f"images: scikit-learn's digits, 8x8 enlarged to 28x28 ({reason}), 1437 to train on"
    )
    read = figures(output)
    check(read, amp, 2 * 23)
    assert int(read["tested"]) == 360
    assert float(read["accuracy"]) > 60, "of ten digits, guessing gets 10% right"


class MNIST:
    """In torchvision's place: 130 images (50 to test with) whose brightness is their label."""

    damage: Exception | None = None

    def __init__(self, root: str, train: bool = True) -> None:
        assert (Path(root) / "MNIST").is_dir()
        if self.damage:
            raise self.damage
        count = 130 if train else 50
        self.targets = torch.arange(count) % 10
        self.data = (self.targets * 25).to(torch.uint8).view(-1, 1, 1).expand(-1, 28, 28)


@pytest.fixture
def mnist_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with MNIST and a torchvision that reads it."""
    package, datasets = map(types.ModuleType, ("torchvision", "torchvision.datasets"))
    datasets.MNIST = MNIST
    for module in (package, datasets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "MNIST").mkdir()
    return tmp_path


def test_digits_with_mnist(workloads, mnist_folder, capsys):
    data = workloads.digits.load(mnist_folder)
    assert data.images[:, 5, 5].mul(255).round().equal(data.labels * 25.0)
    workloads.digits.main(["--amp", "amp_ext", "--device", "cpu", "--data", str(mnist_folder)])
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "images: MNIST, 130 to train on"
    read = figures(output)
    check(read, "amp_ext", 2 * 3)
    assert int(read["tested"]) == 50


@pytest.mark.parametrize("damage", [EOFError(), ValueError("bad\nmagic number 7")], ids=repr)
def test_damaged_mnist_is_one_sentence(workloads, mnist_folder, monkeypatch, damage):
    monkeypatch.setattr(MNIST, "damage", damage)
    with pytest.raises(SystemExit) as raised:
        workloads.digits.main(["--device", "cpu", "--data", str(mnist_folder)])
    reason = "EOFError" if isinstance(damage, EOFError) else "bad magic number 7"
    assert raised.value.code == f"digits: MNIST under {mnist_folder} cannot be read: {reason}"


def test_mnist_without_torchvision_falls_back(workloads, mnist_folder, monkeypatch):
    small_digits()
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    source = workloads.digits.load(mnist_folder).source
    assert "(torchvision cannot be imported: " in source


def test_without_any_digits_one_sentence_says_what_to_install(workloads, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"no MNIST under .*: pip install scikit-learn"):
        workloads.digits.load(tmp_path)


# ---- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["checkerboard", *(pytest.param(n, marks=pytest.mark.full) for n in ("regression", "digits"))],
)
def test_runs_as_a_script(name):
    script = BENCH / "workloads" / f"{name}.py"
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for option in ("--device", "--amp {none,torch,amp_ext}", "--steps"):
        assert option in run.stdout


def test_no_steps_are_refused(workloads, capsys):
    with pytest.raises(SystemExit):
        workloads.digits.main(["--steps", "0"])
    assert "argument --steps: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused(workloads, capsys):
    with pytest.raises(SystemExit):
        workloads.digits.main(["--device", "cuda"])
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("amp_ext", torch.float16)])
def test_optimizer_and_network_stay_fp32(workloads, amp, dtype):
    batches = [(torch.randn(64, 28, 28), torch.zeros(64, dtype=torch.int64))]
    trainer = workloads.digits.training(amp, CPU, batches)
    seen = []
    trainer.network.register_forward_hook(lambda network, inputs, output: seen.append(output.dtype))
    trainer.step()
    assert seen == [dtype]
    state = [t for values in trainer.optimizer.state.values() for t in values.values()]
    assert len(state) == 4 * 3, "step and two moments of four parameters"
    for tensor in (*state, *trainer.network.parameters()):
        assert tensor.dtype == torch.float32
