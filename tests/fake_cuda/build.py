"""Build the kernels of amp_ext for the CUDA runtime without a GPU."""

from __future__ import annotations

from pathlib import Path

from cudasim import cuda
from ptx_backend import build


def ptx(capability: int) -> Path:
    """Return a folder of the PTX of csrc/kernels for devices of a capability."""
    return build.ptx(cuda.architecture(capability))
