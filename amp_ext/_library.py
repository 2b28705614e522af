"""Load the extension module, the ops under ``torch.ops.amp_ext``, and the libraries of kernels."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

REBUILD = "pip install --force-reinstall --no-deps ."


def check_build(built_against: str, installed: str) -> None:
    """Raise ImportError for a module that was built against an incompatible torch.

    torch's C++ interface changes with the minor version, and between CPU and CUDA builds. Patch
    releases of the same build keep it. Development versions promise nothing.
    """
    if _interface(built_against) != _interface(installed):
        raise ImportError(
            f"amp_ext was built against torch {built_against}, but torch {installed} is installed; "
            f"get the wheel for this torch, or rebuild it from its source tree with: {REBUILD}"
        )


def _interface(version: str) -> str:
    """Return 2.14+cu130 for 2.14.1+cu130, and a development version as it is."""
    return re.sub(r"^(\d+\.\d+)\.\d+(?=$|\+(cpu$|cu\d+$))", r"\1", version)


def load_library(name: str) -> tuple[Path, list[str]]:
    """Load the library of a backend from the folder of the module.

    Returns its path, and the architectures of its GPU code, such as "8.0+PTX".

    Raises ImportError if the library is missing or belongs to another module. The error ends with
    a remedy.
    """
    path = Path(_C.__file__).with_name(f"libamp_ext_{name}.so")
    remedy = f"rebuild it from its source tree with: {REBUILD}"
    return path, _C.load_backend(str(path), remedy).split()


if find_spec("amp_ext._build_info") is None or find_spec("amp_ext._C") is None:
    raise ImportError(
        f"amp_ext in {Path(__file__).parent} has no extension module; start Python outside of the "
        f"source tree to find an installed one, or build it from the source tree with: {REBUILD}"
    )

from amp_ext._build_info import CUDA_VERSION, TORCH_VERSION  # noqa: E402

check_build(TORCH_VERSION, torch.__version__)

# After check_build: a module built against another torch cannot be loaded.
from amp_ext import _C  # type: ignore[attr-defined]  # noqa: E402

LIBRARIES: list[Path] = [load_library("cpu")[0]]
CUDA_ARCHES: list[str] = []
if CUDA_VERSION:
    path, CUDA_ARCHES = load_library("cuda")
    LIBRARIES.append(path)
