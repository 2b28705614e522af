"""amp_ext without its extension module: existing tests, the doctor, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_ext
import without_extension
from amp_ext._library import _C

ROOT = without_extension.ROOT
TESTS = [
    "tests/integration/test_seeds.py",
    "tests/scaler/test_grad_scaler.py",
    "tests/scaler/test_clip_grad_norm.py",
    "tests/scaler/test_overflow_report.py",
    "tests/lists/test_ops_memory.py",
    "tests/lists/test_unscale.py",
]
# Each line says in one sentence what is missing, and how to get it.
REFUSED = {
    "tune": "amp_ext.tune().__enter__()",
    "graph": "from amp_ext.graph import make_graphed_step as f; f(None, modules=[], optimizers=[])",
    "lists": "amp_ext.autocast('cpu', custom_fp16_ops={'softmax'})",
    "cuda": "amp_ext.set_backend('cuda')",
}
SCHEMAS = """
import torch, amp_ext
for op in amp_ext.ops.__all__:
    print(getattr(torch.ops.amp_ext, op).default._schema)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without_extension")


def run(folder: Path, *python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python],
        cwd=folder,
        env=without_extension.environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_tests_pass(folder: Path) -> None:
    options = ["-q", "-p", "without_extension", "-p", "no:cacheprovider", "-p", "no:randomly"]
    paths = [str(ROOT / test) for test in TESTS]
    result = run(folder, "-m", "pytest", *options, "--rootdir", str(ROOT), *paths)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


def test_doctor(folder: Path) -> None:
    result = run(folder, "-m", "amp_ext")
    assert result.returncode == 0, result.stdout
    assert "without extension module" in result.stdout
    assert "pip uninstall --yes amp-ext; pip install --no-cache-dir amp-ext" in result.stdout
    assert "FAIL" not in result.stdout


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(folder: Path, call: str) -> None:
    result = run(folder, "-c", f"import amp_ext; {call}")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: "), result.stderr
    assert "needs amp_ext's extension module, which this installation is without; " in last
    assert last.endswith("pip uninstall --yes amp-ext; pip install --no-cache-dir amp-ext")


def test_install_says_that_autocast_stays_torchs(folder: Path) -> None:
    result = run(folder, "-c", "import amp_ext; amp_ext.install(); print(amp_ext.is_installed())")
    assert result.stdout == "False\n"
    assert (
        "RuntimeWarning: amp_ext.install: torch.autocast regions stay torch's own" in result.stderr
    )


def test_schemas_are_those_of_the_extension_module(folder: Path) -> None:
    ours = [str(getattr(torch.ops.amp_ext, op).default._schema) for op in amp_ext.ops.__all__]
    assert run(folder, "-c", SCHEMAS).stdout.splitlines() == ours


def test_nothing_of_it_is_imported_with_an_extension_module() -> None:
    code = "import sys, amp_ext; print([m for m in sys.modules if 'amp_ext._python' in m])"
    assert _C.__name__ == "amp_ext._C"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
