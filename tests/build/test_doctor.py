"""Test that ``python -m amp_ext`` reports the installation and finds broken parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import _C, _build_info, backend, verify
from amp_ext import __main__ as doctor
from amp_ext.backend import backend_for
from amp_ext.ops import GEMM_OPS, LIST_OPS

OPS = LIST_OPS + GEMM_OPS
COMMAND = r"pip install --force-reinstall --no-deps \."


def run(*command: str, package: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python; with the package in a copy of its folder, where no other import can supply it."""
    source = (package or Path(amp_ext.__file__).parent).parent
    return subprocess.run(
        [sys.executable, "-S", *command],
        cwd=source,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_reader_may_close_the_pipe() -> None:
    command = f"{sys.executable} -m amp_ext | true"
    assert subprocess.run(command, shell=True, capture_output=True).stderr == b""


def test_healthy() -> None:
    process = run("-m", "amp_ext")
    said = process.stdout
    assert (process.returncode, process.stderr) == (0, ""), process
    assert f"amp_ext {amp_ext.__version__}\n" in said
    assert f"built for  torch {_build_info.TORCH_VERSION}," in said
    assert f"torch {torch.__version__}," in said
    assert re.search(rf"  cpu      \S.*, {torch.get_num_threads()} threads, ", said)
    assert "amp_ext.install() is not in effect" in said
    assert "FAIL" not in said
    for check in (*(f"{op} on cpu" for op in OPS), "training step on cpu"):
        assert f"  ok    {check}\n" in said
    assert said.endswith("\nall is well\n")


def test_imports_nothing_heavy() -> None:
    """The doctor imports no heavy modules, in particular not torch's compiler."""
    program = """if True:
        import sys, torch
        torch.nn.functional, torch.amp
        before = set(sys.modules)
        from amp_ext.__main__ import main
        assert main() == 0
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
        assert new <= sys.stdlib_module_names | {"amp_ext", "torch"}, new
        """
    process = run("-c", program)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("pattern", "is_truncated", "words"),
    [
        ("_build_info.py", False, "nothing yet"),
        ("_C.*", False, "no extension module"),
        ("_C.*", True, "_C."),  # as after half a copy
    ],
)
def test_module_that_is_not_whole(
    tmp_path: Path, pattern: str, is_truncated: bool, words: str
) -> None:
    """The doctor exits with 1 without a traceback, and names what helps in one line."""
    source, ignored = Path(amp_ext.__file__).parent, shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(source, tmp_path / "amp_ext", ignore=ignored)
    for file in package.glob(pattern):
        file.unlink()
        if is_truncated:
            file.write_bytes(b"\x7fELF")
    process = run("-m", "amp_ext", package=package)
    assert (process.returncode, process.stderr) == (1, ""), process.stderr
    (failure,) = [line for line in process.stdout.splitlines() if "FAIL" in line]
    assert is_truncated or re.search(COMMAND + "$", failure)
    assert words in (failure if is_truncated else process.stdout)


def wrong(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op to return a wrong result or, if it returns None, to write a wrong value."""

    def spoiled(**values: Any) -> Any:
        result = op(**values)
        if isinstance(result, tuple):
            return *result[:-1], result[-1] + 1
        if result is not None:
            return result * 1.5
        if "outputs" in values:
            values["outputs"][-1].add_(1)
        else:
            next(value for value in values.values() if isinstance(value, torch.Tensor)).add_(1)

    spoiled.reference, spoiled.cases = op.reference, op.cases
    return spoiled


def raising(op: Callable[..., Any]) -> Callable[..., Any]:
    def spoiled(**values: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    spoiled.reference, spoiled.cases = op.reference, op.cases
    return spoiled


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [*((name, wrong, "element ") for name in OPS), ("gemm", raising, "first line\n")],
)
def test_broken_op(
    name: str,
    spoil: Callable[..., Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(amp_ext.ops, name, spoil(getattr(amp_ext.ops, name)))
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert f"  FAIL  {name} on cpu: {words}" in said
    assert "second line" not in said
    devices = 2 if torch.cuda.is_available() else 1
    updates_scales = name == "update_scale_"  # as the training step does
    assert said.count("FAIL  ") == devices * (1 + updates_scales)


def scales_in_bf16(self: amp_ext.GradScaler, optimizer: Any) -> None:
    self.unscale_(optimizer)
    for param in optimizer.param_groups[0]["params"] if self.is_enabled() else ():
        param.grad = param.grad.bfloat16().float()
    optimizer.step()


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [(amp_ext.GradScaler, "step", scales_in_bf16), (amp_ext, "autocast", torch.autocast)],
    ids=["step", "autocast"],
)
def test_broken_training(
    place: Any,
    name: str,
    broken: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gradients that the scaler rounds count as broken, and torch's weight gradients in FP16."""
    monkeypatch.setattr(place, name, broken)
    assert doctor.main() == 1
    assert "  FAIL  training step on cpu: the result differs" in capsys.readouterr().out


def test_broken_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check fails on a GPU that is listed but unusable; the other checks go on."""
    compare = verify.compare

    def on_broken_gpu(case: Any, device: torch.device) -> None:
        if device.type == "cuda":
            raise RuntimeError("no GPU")
        compare(case, device)

    gpu = SimpleNamespace(name="NVIDIA Test", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(verify, "compare", on_broken_gpu)
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "  cuda:0   NVIDIA Test, compute capability 9.0, 80 GiB\n" in said
    assert "  FAIL  gemm on cuda:0: no GPU\n" in said
    assert ("  FAIL  unscale_ on cuda:0: no GPU\n" in said) == _C.cuda_built()
    assert "  ok    training step on cpu\n" in said


# ---- backends ----------------------------------------------------------------------------------


@pytest.mark.skipif(_C.cuda_built(), reason="this module has CUDA kernels")
def test_refused_tensors_come_with_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend._C, "cuda_built", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _C.use_backend("cuda", "cuda")
    assert re.search(f"FORCE_CUDA=1 {COMMAND}$", backend_for("cuda").reason)
    doctor.print_backends()
    said = capsys.readouterr().out
    assert len(re.findall(f"none .*FORCE_CUDA=1 {COMMAND}", said)) == 1, said


def test_a_cpu_build_of_torch_has_no_cuda_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the reason, and no command advises a step that would fail."""
    monkeypatch.setattr(torch.version, "cuda", None)
    _C.use_backend("cuda", "cuda")  # as where Triton is not installed
    doctor.print_backends()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cuda")]
    assert len(lines) == 1 and "torch is a CPU build" in lines[0], lines
    assert "FORCE_CUDA" not in lines[0]
