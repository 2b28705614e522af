"""Loading the extension module: one that does not fit says so in one sentence with a command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_ext
from amp_ext import _C, _build_info
from amp_ext._library import check_build
from amp_ext.ops import LIST_OPS

# One sentence, without a stop inside, that ends with a command.
SENTENCE = r"^amp_ext [^\n]*(rebuild|build) it [^\n]*: (\w+=\S+ )?pip install \S.*$"


def import_error(package: Path) -> str:
    """Import the package in `package`'s parent in a process of its own; return the last line."""
    process = subprocess.run(
        # -S: without the finder of an editable install, which would supply what is missing here.
        [sys.executable, "-S", "-c", "import amp_ext"],
        cwd=package.parent,
        env={"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), process.stderr
    return last.removeprefix("ImportError: ")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package."""
    source = Path(amp_ext.__file__).parent
    return shutil.copytree(
        source, tmp_path / "amp_ext", ignore=shutil.ignore_patterns("__pycache__")
    )


def test_module_built_against_another_torch(package: Path) -> None:
    info = (package / "_build_info.py").read_text()
    other = info.replace(torch.__version__, "1.13.1+other")
    assert other != info
    (package / "_build_info.py").write_text(other)
    message = import_error(package)
    assert re.match(SENTENCE, message), message
    assert "built against torch 1.13.1+other" in message
    assert f"torch {torch.__version__} is installed" in message


@pytest.mark.parametrize(
    ("built_against", "installed", "fits"),
    [
        ("2.14.0+cu130", "2.14.1+cu130", True),
        ("2.13.0+cpu", "2.13.1+cpu", True),
        ("2.14.0", "2.14.1", True),
        ("2.14.0+cu130", "2.15.0+cu130", False),
        ("2.1.0+cu130", "2.11.0+cu130", False),
        ("2.14.0+cu130", "2.14.0+cu126", False),
        ("2.14.0+cu130", "2.14.1+cpu", False),
        ("2.14.0+cu130", "2.14.1", False),
        ("2.15.0a0+git1a2b3c4", "2.15.0a0+git1a2b3c4", True),
        ("2.15.0a0+git1a2b3c4", "2.15.0a0+git5d6e7f8", False),
        ("2.15.0.dev20261101+cu130", "2.15.0.dev20261102+cu130", False),
        ("2.15.0+cu130", "2.15.1.dev20261102+cu130", False),
    ],
)
def test_patch_releases_of_one_build_fit(built_against: str, installed: str, fits: bool) -> None:
    if fits:
        check_build(built_against, installed)
    else:
        with pytest.raises(ImportError, match=SENTENCE):
            check_build(built_against, installed)


@pytest.mark.parametrize("missing", ["_build_info.py", "_C.*"])
def test_module_that_is_not_built(package: Path, missing: str) -> None:
    for file in package.glob(missing):
        file.unlink()
    message = import_error(package)
    assert re.match(SENTENCE, message), message


def test_build_info_describes_this_module() -> None:
    assert torch.__version__ == _build_info.TORCH_VERSION
    assert (_build_info.CUDA_VERSION is not None) == _C.cuda_built()
    assert bool(_build_info.CUDA_ARCHES) == _C.cuda_built()
    assert _build_info.CUDA_VERSION in (None, torch.version.cuda)


@pytest.mark.skipif(_C.cuda_built(), reason="this module has CUDA kernels")
@pytest.mark.parametrize("op", LIST_OPS)
def test_cuda_tensor_given_to_a_cpu_only_module(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the choice of a backend, which every op makes first: there is no CUDA tensor here."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # whose kernels take no CUDA tensors
    amp_ext.set_backend(None)
    with pytest.raises(RuntimeError, match=f"^amp_ext::{op}: amp_ext was built without") as raised:
        _C.choose(f"amp_ext::{op}", "cuda")
    message = str(raised.value).partition(": ")[2]
    assert re.match(SENTENCE, message), message
