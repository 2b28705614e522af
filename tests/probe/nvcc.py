"""Build the probe's kernels for compute capability 9.0, by nvcc."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

from fake_cuda.recorder import is_running

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = HERE / "probes.cu"
LIBRARY = ROOT / "build" / "nvcc" / "probe.so"
FLAGS = (
    *("-std=c++20", "-Xcompiler=-fPIC", "-Xptxas=-v", "-Werror=all-warnings", "-shared"),
    *("--threads=0", "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]"),
    *(f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc/kernels"),
)


def find() -> str | None:
    """Return the nvcc of CUDA_HOME or else of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def missing() -> str:
    """Return why the kernels cannot run on a GPU here; empty if they can."""
    import torch

    if find() is None:
        return "there is no nvcc on PATH or in CUDA_HOME"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    present = torch.cuda.get_device_capability()
    return "" if present == (9, 0) else "the GPU has compute capability {}.{}".format(*present)


@functools.cache
def compile() -> tuple[Path, str]:
    """Return the library of the kernels, and the output of ptxas.

    No GPU is needed. A warning is an error.
    """
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    runtime = ["-cudart=none"] if is_running() else []  # the preloaded one
    command = [find() or "nvcc", *FLAGS, *runtime, str(SOURCE), "-o", str(LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return LIBRARY, done.stdout + done.stderr
