"""Test that ``python -m amp_ext`` reports the installation and finds broken parts."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import amp_ext
import programs
from amp_ext import _C, _build_info, ops, verify
from amp_ext import __main__ as doctor

COMMAND = r"pip install --force-reinstall --no-deps \.$"
PACKAGE = Path(amp_ext.__file__).parent


def test_a_reader_may_close_the_pipe() -> None:
    command = f"{sys.executable} -m amp_ext | true"
    assert subprocess.run(command, shell=True, capture_output=True).stderr == b""


def test_healthy() -> None:
    process = programs.run_with(PACKAGE.parent, "-m", "amp_ext")
    said = process.stdout
    assert (process.returncode, process.stderr) == (0, ""), process
    assert f"amp_ext {amp_ext.__version__}\n" in said
    assert f"built for  torch {_build_info.TORCH_VERSION}," in said
    assert f"torch {torch.__version__}," in said
    assert re.search(rf"  cpu      \S.*, {torch.get_num_threads()} threads, ", said)
    assert "FAIL" not in said
    for check in (*(f"{op} on cpu" for op in ops.__all__), "training step on cpu"):
        assert f"  ok    {check}\n" in said
    assert said.endswith("\nall is well\n")


def test_imports_nothing_heavy() -> None:
    """amp_ext and the doctor import no other package, no DTensor and no compiler of torch's.

    Products are counted from the import of torch's counter on.
    """
    programs.output("""
        import sys, torch
        torch.nn.functional, torch.amp
        before = set(sys.modules)
        from amp_ext.__main__ import main
        assert main() == 0
        new = set(sys.modules) - before
        packages = {name.partition(".")[0] for name in new}
        assert packages <= sys.stdlib_module_names | {"amp_ext", "torch"}, packages
        heavy = "torch.distributed", "torch.utils.flop_counter", "amp_ext.integrations"
        assert not [name for name in new if name.startswith(heavy)], new
        assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            torch.ops.amp_ext.gemm(torch.ones(2, 2), torch.ones(2, 2))
        assert counter.get_total_flops() == 16
    """)


@pytest.mark.parametrize(
    ("pattern", "is_truncated", "words"),
    [
        ("_build_info.py", False, COMMAND),
        ("_C.*", False, f"no extension module.*{COMMAND}"),
        ("_C.*", True, r"_C\."),  # as after half a copy
    ],
)
def test_module_that_is_not_whole(
    tmp_path: Path, pattern: str, is_truncated: bool, words: str
) -> None:
    """The doctor exits with 1 without a traceback, and names what helps in one line."""
    ignored = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(PACKAGE, tmp_path / "amp_ext", ignore=ignored)
    for file in package.glob(pattern):
        file.unlink()
        if is_truncated:
            file.write_bytes(b"\x7fELF")
    process = programs.run_with(tmp_path, "-m", "amp_ext")
    assert (process.returncode, process.stderr) == (1, ""), process.stderr
    (failure,) = [line for line in process.stdout.splitlines() if "FAIL" in line]
    assert re.search(words, failure)
    assert ("built for  nothing yet" in process.stdout) == (pattern == "_build_info.py")


@functools.wraps(ops.gemm)
def wrong(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    return wrong.__wrapped__(*operands, **options) * 1.5


@functools.wraps(ops.unscale_)
def raising(**values: Any) -> None:
    raise RuntimeError("first line\nsecond line")


def checks_alone(self: amp_ext.GradScaler, optimizer: Any) -> None:
    if self.is_enabled():
        self._check_inf_per_device(optimizer)


@pytest.mark.parametrize(
    ("place", "name", "broken", "words"),
    [
        (ops, "gemm", wrong, "gemm on cpu: element [0, 0, 0] of result is "),
        (ops, "unscale_", raising, "unscale_ on cpu: first line\n"),
        (amp_ext, "autocast", torch.autocast, "training step on cpu: the result differs"),
        (amp_ext.GradScaler, "step", checks_alone, "training step on cpu: the result differs"),
    ],
    ids=["wrong", "raising", "autocast", "step"],
)
def test_broken_part(
    place: Any, name: str, broken: Any, words: str, monkeypatch: Any, capsys: Any
) -> None:
    """Weight gradients in FP16, as torch's, and gradients left scaled count as broken too."""
    monkeypatch.setattr(place, name, broken)
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert f"  FAIL  {words}" in said
    assert "second line" not in said
    if place is ops:
        assert said.count("FAIL  ") == (2 if torch.cuda.is_available() else 1)


def test_broken_gpu(monkeypatch: Any, capsys: Any) -> None:
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
    assert "  FAIL  unscale_ on cuda:0: no GPU\n" in said
    assert "  ok    training step on cpu\n" in said


def test_a_cpu_build_of_torch_has_no_cuda_backend(monkeypatch: Any, capsys: Any) -> None:
    """One line names the reason, and no command advises a step that would fail."""
    monkeypatch.setattr(torch.version, "cuda", None)
    _C.use_backend("cuda", "cuda")  # as where Triton is not installed
    doctor.print_backends()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cuda")]
    assert len(lines) == 1 and "torch is a CPU build" in lines[0], lines
    assert "FORCE_CUDA" not in lines[0]
