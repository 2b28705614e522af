"""Loads the extension module, and with it the ops under ``torch.ops.amp_ext``."""

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

__all__ = ["_C", "check_build"]
