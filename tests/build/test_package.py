"""Test the build: the decisions of setup.py, and the contents of an sdist."""

import importlib.util
import json
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


def load(name: str) -> ModuleType:
    """Import a file of the repository by its name; the file is not on sys.path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_backend = load("build_backend")
setup = load("setup")


# ---- architectures ---------------------------------------------------------------------------


def arches_of(text: str, folder: Path) -> list[str]:
    """Return what arches.cmake makes of a list: all, those of sm80, and those of sm90."""
    (nvcc := folder / "nvcc").write_text("#!/bin/sh\nprintf 'compute_%s\\n' 75 80 86 90\n")
    nvcc.chmod(0o755)
    (script := folder / "script.cmake").write_text(
        f"cmake_minimum_required(VERSION 3.26)\nset(CMAKE_CUDA_COMPILER {nvcc})\n"
        f"include({ROOT}/csrc/cmake/arches.cmake)\n"
        'message("${arches} | ${CMAKE_CUDA_ARCHITECTURES} | ${sm80_arches} | ${sm90_arches}")\n'
    )
    command = [sys.executable, "-m", "cmake", "-P", str(script)]
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": text}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stderr.rstrip("\n").split(" | ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "7.5;8.0+PTX;9.0a | 75-real;80;90a-real | 80;90a-real | 90a-real"),
        ("8.0 8.6;", "8.0;8.6 | 80-real;86-real | 80-real;86-real | "),
        ("9.0", "9.0a | 90a-real | 90a-real | 90a-real"),
        ("9.0+PTX", "9.0a;9.0+PTX | 90a-real;90 | 90a-real;90 | 90a-real"),
        ("8.0+PTX 12.0", "8.0+PTX;12.0 | 80;120-real | 80;120-real | "),
        ("7.5+PTX;8.0;10.0", "7.5+PTX;8.0;10.0 | 75;80-real;100-real | 80-real;100-real | "),
        ("9.0a+PTX;10.0", "9.0a+PTX;10.0 | 90a;100-real | 90a;100-real | 90a"),
        ("10.0+PTX", "10.0+PTX | 100 | 100 | "),
        ("7.5", "7.5 | 75-real |  | "),
    ],
)
def test_architectures(text: str, expected: str, tmp_path: Path) -> None:
    """The list takes torch's separators. An empty list is what nvcc knows of the default.

    9.0 stands for 9.0a, with Hopper's own instructions. The sm80 kernels reach 10.x by the PTX of
    8.x and 9.0, and are built for 10.x without it.
    """
    assert arches_of(text, tmp_path) == expected.split(" | ")


def test_an_error_names_a_bad_architecture(tmp_path: Path) -> None:
    for text in ("80", "8.0+ptx", "9.0b"):
        with pytest.raises(ValueError, match=f"TORCH_CUDA_ARCH_LIST.*'{re.escape(text)}'"):
            arches_of(f"8.0;{text}", tmp_path)


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


def test_flags_of_arithmetic(tmp_path: Path) -> None:
    """No file of the CPU library gets fast math, and only products get fused multiply-adds."""
    command = [sys.executable, "-m", "cmake", "-S", ROOT / "csrc", "-B", tmp_path]
    subprocess.run([*command, "-DAMP_EXT_PART=cpu"], check=True)
    entries = json.loads((tmp_path / "compile_commands.json").read_text())
    for entry in entries:
        *_, last = re.findall(r"-ffp-contract=(\w+)", entry["command"])
        assert last == ("fast" if Path(entry["file"]).name == "rows.cpp" else "off")
        assert "fast-math" not in entry["command"]


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
    for folder in ("amp_ext", "triton_kernels", "csrc"):
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
    sentence = r"error: csrc/cpu did not compile, .*: the build needs a C\+\+20 compiler, .*wheel"
    assert done.returncode == 1 and len(re.findall(sentence, said)) == 1, said
    assert "no-such-c++" in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.whl"))


def test_sdist_holds_what_a_build_needs(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    listed = set((tmp_path / "amp_ext.egg-info/SOURCES.txt").read_text().split())
    needed = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "amp_ext", "triton_kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".map"}
    }
    generated = "amp_ext/_build_info.py"
    assert needed - {generated} <= listed
    assert {"setup.py", "build_backend.py", "pyproject.toml", "LICENSE"} <= listed
    assert {"README.md", "docs/migrating.md", "docs/zh/README.md"} <= listed
    assert "amp_ext/py.typed" in listed
    assert generated not in listed
    assert not [name for name in listed if name.endswith(".so")]
