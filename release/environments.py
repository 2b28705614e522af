"""The Pythons and torches that a release is built for and tried with, each pair in a virtual
environment of its own in build/release.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
# What builds need beside torch, and what a package that is tried imports.
BESIDE_TORCH = ("setuptools", "wheel", "ninja", "numpy")
# Headers that torch's CUDA wheels include and do not bring.
HEADERS = {
    "12": ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12"),
    "13": ("nvidia-cuda-crt", "nvidia-cuda-cccl"),
}
ASK = """
import json, sys, torch
print(json.dumps([torch.__version__, torch.version.cuda, "cp%d%d" % sys.version_info[:2]]))
"""


class Torch(NamedTuple):
    """An installed torch: the interpreter of its environment, versions ("2.11.0+cu130", "13.0" or
    None) and the Python's tag ("cp311").
    """

    python: Path
    version: str
    cuda: str | None
    tag: str

    def __str__(self) -> str:
        return f"torch {self.version}, {self.tag}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--torch", nargs="+", required=True, metavar="2.13.0")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="python3.11")


def torches(options: argparse.Namespace) -> Iterator[Torch]:
    """Of the pairs that were asked for, those that can be installed; one line says what cannot."""
    for name in filter(shutil.which, options.python):
        for version in options.torch:
            folder = ROOT / "build/release" / f"{name}-torch{version}"
            python = folder / "bin/python"
            if not (folder / "made").exists() and (reason := make(name, version, folder)):
                print(f"torch {version}, {name}: left out: {reason}", flush=True)
                continue
            yield installed(python)


def installed(python: Path) -> Torch:
    found = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
    return Torch(python, *json.loads(found.stdout))


def make(name: str, version: str, folder: Path) -> str | None:
    """Make an environment with that torch, or return why that cannot be done."""
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    beside = ["-c", ROOT / "constraints.txt", *BESIDE_TORCH]
    if reason := failure([name, "-m", "venv", folder]):
        return reason
    if reason := failure([*pip, f"torch=={version}", *beside]):
        return reason
    if cuda := installed(python).cuda:
        headers = [f"{name}=={cuda}.*" for name in HEADERS[cuda.split(".")[0]]]
        if reason := failure([*pip, *headers]):
            return reason
    (folder / "made").touch()
    return None


def failure(command: list[str | Path]) -> str | None:
    """What a command says that fails: its last line."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip() or f"{command[0]} fails"
    return said.splitlines()[-1] if done.returncode else None
