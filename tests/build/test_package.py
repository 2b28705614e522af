"""Test the build: the decisions of setup.py, and the contents of an sdist."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from setuptools.errors import PlatformError

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"75", "80", "86", "90", "100", "120"}  # to nvcc 13.0, among others


def load(name: str) -> ModuleType:
    """Import a file of the repository by its name; the file is not on sys.path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_backend = load("build_backend")
setup = load("setup")


# ---- architectures ---------------------------------------------------------------------------


DEFAULT = ["7.5", "8.0+PTX", "9.0a", "10.0", "12.0"]


def test_arch_list() -> None:
    """The list takes torch's separators; empty, it is what nvcc knows of the default."""
    assert setup.parse_arch_list("", KNOWN) == DEFAULT
    assert setup.parse_arch_list("", {"75", "80", "90"}) == ["7.5", "8.0+PTX", "9.0a"]
    assert setup.parse_arch_list(" 8.0+PTX 9.0a;", KNOWN) == ["8.0+PTX", "9.0a"]
    # Hopper has its own instructions.
    assert setup.parse_arch_list("8.0+PTX;9.0", KNOWN) == ["8.0+PTX", "9.0a"]
    assert setup.parse_arch_list("9.0+PTX", KNOWN) == ["9.0a", "9.0+PTX"]


def test_arch_list_names_a_bad_entry() -> None:
    for text in ("80", "8.0+ptx", "9.0b"):
        with pytest.raises(PlatformError, match=f"TORCH_CUDA_ARCH_LIST.*{re.escape(repr(text))}"):
            setup.parse_arch_list(f"8.0;{text}", KNOWN)


@pytest.mark.parametrize(
    ("folder", "arches", "expected"),
    [
        ("lists", DEFAULT, DEFAULT),
        ("gemm/sm80", DEFAULT, ["8.0+PTX", "9.0a", "12.0"]),
        ("gemm/sm80", ["10.0+PTX"], ["10.0+PTX"]),
        ("gemm/sm80", ["9.0a+PTX", "10.0"], ["9.0a+PTX", "10.0"]),
        ("gemm/sm80", ["7.5+PTX", "8.0", "10.0"], ["8.0", "10.0"]),
        ("gemm/sm80", ["7.5"], []),
        ("gemm/sm90", DEFAULT, ["9.0a"]),
    ],
)
def test_arch_specific_files(folder: str, arches: list[str], expected: list[str]) -> None:
    assert setup.arches_of(Path("csrc/kernels", folder, "x.cu"), arches) == expected


# ---- toolkit and the decision ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("force_cpu", "nvcc", "torch_cuda", "obstacle"),
    [
        (False, "13.0", "13.0", ""),
        (False, "13.1", "13.0", ""),
        (True, "13.0", "13.0", "FORCE_CPU is set"),
        (False, "13.0", None, "torch is not a CUDA build"),
        (False, None, "13.0", "no nvcc"),
        (False, "12.6", "13.0", "nvcc is of CUDA 12.6 and torch of CUDA 13.0"),
    ],
)
def test_when_kernels_are_built(
    force_cpu: bool, nvcc: str | None, torch_cuda: str | None, obstacle: str, capsys: Any
) -> None:
    """Kernels are built unless there is an obstacle. FORCE_CUDA makes the obstacle an error."""
    assert setup.builds_kernels(force_cpu, False, nvcc, torch_cuda) == (not obstacle)
    assert obstacle in capsys.readouterr().out
    fails = pytest.raises(PlatformError, match=f"FORCE_CUDA is set, but .*{obstacle}")
    with fails if obstacle else nullcontext():
        assert setup.builds_kernels(force_cpu, True, nvcc, torch_cuda)


# ---- flags of each file ------------------------------------------------------------------------


def test_flags_of_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file gets fast math; updates have no fused multiply-adds, for equal bits everywhere."""
    monkeypatch.chdir(ROOT)
    package = Path(torch.__file__).parent
    folders = setup.cuda_folders(package, setup.Toolkit("nvcc", "13.0", Path("/opt/cuda")))
    found = [*setup.module_units(package, folders), *setup.cpu_units(), *setup.cuda_units(["9.0a"])]
    units = {name: flags for _, name, flags in found}
    fast = {flag for flags in units.values() for flag in flags if "fast" in flag}
    assert fast <= {"-ffp-contract=fast"}
    kernels = {name for name, flags in units.items() if "-fmad=false" in flags}
    assert kernels == {"csrc/kernels/optim/adam.cu.o", "csrc/kernels/optim/sgd.cu.o"}
    assert "-ffp-contract=off" in units["csrc/cpu/isa/update.cpp.baseline.o"]


# ---- packaging ---------------------------------------------------------------------------------


def test_build_uses_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Path(torch.__file__).parents[1]) in build_backend.installed_path()
    assert build_backend.get_requires_for_build_wheel() == []

    monkeypatch.setattr(build_backend, "installed_path", list)
    monkeypatch.setattr(sys, "path", [])
    assert build_backend.get_requires_for_build_wheel() == ["torch>=2.11"]


def test_install_without_a_compiler(tmp_path: Path) -> None:
    """The install without a compiler fails with one sentence that helps."""
    tree = tmp_path / "tree"  # what a build reads before it compiles
    for folder in ("amp_ext", "triton_kernels"):
        left_out = shutil.ignore_patterns("_C.*", "_build_info.py", "__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=left_out)
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    environment = {**os.environ, "CXX": "no-such-c++ -pipe"}
    done = subprocess.run(
        [*command, "-w", tmp_path, tree], capture_output=True, text=True, env=environment
    )
    said = done.stdout + done.stderr
    sentence = (
        r"error: amp_ext needs a C\+\+20 compiler, and there is no no-such-c\+\+: .* wheel .*"
    )
    assert done.returncode == 1 and len(re.findall(sentence, said)) == 1, said
    assert "Traceback" not in said and not list(tmp_path.glob("*.whl"))


def test_sdist_holds_what_a_build_needs(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    listed = set((tmp_path / "amp_ext.egg-info/SOURCES.txt").read_text().split())
    needed = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "amp_ext", "triton_kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}
    }
    generated = "amp_ext/_build_info.py"
    assert needed - {generated} <= listed
    assert {"setup.py", "build_backend.py", "pyproject.toml", "LICENSE"} <= listed
    assert {"README.md", "docs/migrating.md", "docs/zh/README.md"} <= listed
    assert "amp_ext/py.typed" in listed
    assert generated not in listed
    assert not [name for name in listed if name.endswith(".so")]
