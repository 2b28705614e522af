"""Test the pages of wheels that `make wheels` writes. The wheels here hold no code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import wheels

NAME = "amp_ext-9.9-py3-none-any.whl"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: amp-ext\nVersion: 9.9\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def make_wheel(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("amp_ext/__init__.py", f"folder = {folder.name!r}\n")
        for name, text in INFO.items():
            archive.writestr(f"amp_ext-9.9.dist-info/{name}", text)
    return folder / NAME


def pip_install(page: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-cache-dir"]
    command += ["-f", page, "--target", target, "amp-ext"]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_page_is_for_one_torch(tmp_path: Path) -> None:
    """Wheels of equal names lie apart, each under its own page; another wheel is refused."""
    wheel, page = None, None
    for name in ("torch2.99-cpu", "torch2.99-cu130"):
        wheel = make_wheel(tmp_path / "dist" / name)
        page = wheels.write_page(wheel.parent)
        assert page == tmp_path / "dist" / f"{name}.html"
        done = pip_install(page, tmp_path / name)
        assert done.returncode == 0, done.stderr
        installed = tmp_path / name / "amp_ext/__init__.py"
        assert installed.read_text() == f"folder = {name!r}\n"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("amp_ext/more.py", "")
    done = pip_install(page, tmp_path / "target")
    assert done.returncode == 1 and "HASH" in done.stderr.upper(), done.stderr
