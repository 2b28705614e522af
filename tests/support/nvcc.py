"""Build sources with kernels for a GPU, by nvcc, as a shared library.

Libraries are kept in build/nvcc under the hash of all that they depend on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
INTO = ROOT / "build" / "nvcc"
INCLUDES = (ROOT / "csrc/include", ROOT / "csrc/kernels")
JOBS = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
FLAGS = ("-std=c++20", "-Xcompiler=-fPIC", "-Xptxas=-v", "-Werror=all-warnings")


def find() -> str | None:
    """Return the nvcc of CUDA_HOME or else of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def missing(arch: str = "80") -> str:
    """Return why code for an architecture such as "80" or "90a" cannot run here; empty if it can.

    Code for "80" runs on later GPUs as well, that for "90a" on compute capability 9.0 alone.
    """
    if find() is None:
        return "there is no nvcc on PATH or in CUDA_HOME"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    present = "{}{}".format(*torch.cuda.get_device_capability())
    wanted = arch.rstrip("a")
    if int(present) < int(wanted) or (arch != wanted and present != wanted):
        return f"the GPU has compute capability {present[:-1]}.{present[-1]}, not that of sm_{arch}"
    return ""


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{log}")
    return log


def _digest(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a hash of the command, the sources and the headers that these may include."""
    folders = {*INCLUDES, *(source.parent for source in sources)}
    headers = (path for folder in folders for path in folder.rglob("*.*h"))
    digest = hashlib.sha256("\0".join([*command, _run([command[0], "--version"])]).encode())
    for path in (*sources, *sorted(headers)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile(
    name: str, sources: Sequence[Path], arch: str, cudart: str = "static"
) -> tuple[Path, str]:
    """Return a library of the sources for an architecture, and the output of ptxas.

    No GPU is needed. A warning is an error. With the `cudart` "shared" it has torch's CUDA runtime.
    """
    nvcc = find()
    if nvcc is None:
        raise RuntimeError(f"{name}: {missing(arch)}")
    includes = (f"-I{folder}" for folder in INCLUDES)
    code = f"-gencode=arch=compute_{arch},code=[sm_{arch},compute_{arch}]"
    command = [nvcc, *FLAGS, *includes, code, f"-cudart={cudart}"]
    library = INTO / f"{name}-{arch}-{_digest(command, sources)}.so"
    log = library.with_suffix(".log")
    if library.exists():
        return library, log.read_text()

    INTO.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=INTO) as made, ThreadPoolExecutor(JOBS) as pool:
        objects = [f"{made}/{source.stem}.o" for source in sources]
        jobs = [
            pool.submit(_run, [*command, "-c", str(source), "-o", target])
            for source, target in zip(sources, objects, strict=True)
        ]
        log.write_text("".join(job.result() for job in jobs))
        unfinished = f"{made}/{library.name}"
        _run([nvcc, "-shared", f"-cudart={cudart}", *objects, "-o", unfinished])
        os.replace(unfinished, library)
    return library, log.read_text()


def build(name: str, sources: Sequence[Path], arch: str, cudart: str = "static") -> Path:
    """Return a library of the sources for a GPU."""
    return compile(name, sources, arch, cudart)[0]
