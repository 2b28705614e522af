"""Build the probe's kernels for compute capability 9.0, by nvcc.

The library is kept in build/nvcc under the hash of all that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = sorted(HERE.glob("*.cu"))
INTO = ROOT / "build" / "nvcc"
INCLUDES = (ROOT / "csrc/include", ROOT / "csrc/kernels")
FLAGS = (
    *("-std=c++20", "-Xcompiler=-fPIC", "-Xptxas=-v", "-Werror=all-warnings", "-shared"),
    *("--threads=0", "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]"),
    *(f"-I{folder}" for folder in INCLUDES),
)


def find() -> str | None:
    """Return the nvcc of CUDA_HOME or else of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def missing() -> str:
    """Return why the kernels cannot run on a GPU here; empty if they can."""
    if find() is None:
        return "there is no nvcc on PATH or in CUDA_HOME"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    present = torch.cuda.get_device_capability()
    return "" if present == (9, 0) else "the GPU has compute capability {}.{}".format(*present)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{log}")
    return log


def compile() -> tuple[Path, str]:
    """Return the library of the kernels, and the output of ptxas.

    No GPU is needed. A warning is an error.
    """
    nvcc = find()
    if nvcc is None:
        raise RuntimeError(missing())
    digest = hashlib.sha256("\0".join([*FLAGS, _run([nvcc, "--version"])]).encode())
    headers = (path for folder in (*INCLUDES, HERE) for path in folder.rglob("*.*h"))
    for path in (*SOURCES, *sorted(headers)):
        digest.update(path.name.encode() + path.read_bytes())
    library = INTO / f"probe-{digest.hexdigest()[:16]}.so"
    log = library.with_suffix(".log")
    if not library.exists():
        INTO.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=INTO) as made:
            unfinished = f"{made}/{library.name}"
            log.write_text(_run([nvcc, *FLAGS, *map(str, SOURCES), "-o", unfinished]))
            os.replace(unfinished, library)
    return library, log.read_text()
