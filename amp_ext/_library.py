"""Loads the extension module, and with it the ops under ``torch.ops.amp_ext``, and the libraries of
kernels.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

REBUILD = "pip install --force-reinstall --no-deps ."


def check_build(built_against: str, installed: str) -> None:
    """Raises ImportError when the module was built against another torch than the installed one.

    torch's C++ interface differs from version to version and between its CPU and CUDA builds.
    """
    if built_against != installed:
        raise ImportError(
            f"amp_ext was built against torch {built_against}, but torch {installed} is installed; "
            f"rebuild it from its source tree with: {REBUILD}"
        )


if find_spec("amp_ext._C") is None or find_spec("amp_ext._build_info") is None:
    raise ImportError(
        f"amp_ext in {Path(__file__).parent} has no extension module; start Python outside of the "
        f"source tree to find an installed one, or build it from the source tree with: {REBUILD}"
    )

from amp_ext import _build_info  # noqa: E402

check_build(_build_info.TORCH_VERSION, torch.__version__)

from amp_ext import _C  # noqa: E402  (a module that was built against another torch cannot be loaded)


def load_library(name: str, package: str) -> Path:
    """Loads the library of a backend: the one beside the module, else that of a package of its own.

    Raises ImportError where there is none, or where it is not for this module; a sentence that ends
    with what helps.
    """
    file = f"libamp_ext_{name}.so"
    found = find_spec(package)
    folders = (Path(_C.__file__).parent, *(found.submodule_search_locations or () if found else ()))
    path = next((path for folder in folders if (path := Path(folder, file)).is_file()), None)
    if _build_info.MODULE_ONLY:
        wanted = f"{package.replace('_', '-')}=={_build_info.VERSION}"
        remedy = f"install the one that fits with: pip install --force-reinstall {wanted}"
    else:
        remedy = f"rebuild it from its source tree with: {REBUILD}"
    if path is None:
        raise ImportError(f"amp_ext finds no library {file} in {folders[0]}; {remedy}")
    _C.load_backend(str(path), remedy)
    return path


_CUDA = (_build_info.CUDA_VERSION or "").partition(".")[0]
LIBRARIES = [load_library("cpu", "amp_ext_kernels_cpu")]
if _CUDA:
    LIBRARIES += [load_library("cuda", f"amp_ext_kernels_cu{_CUDA}")]

__all__ = ["LIBRARIES", "_C", "check_build", "load_library"]
