"""Loads the extension module, and with it the ops under ``torch.ops.amp_ext``."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

REBUILD = "pip install --force-reinstall --no-deps ."


def check_build(built_against: str, installed: str) -> None:
    """Raises ImportError when the module was built against a torch whose C++ interface may differ.

    It does from minor version to minor version and between CPU and CUDA builds. Patch releases of
    the same build keep it; development versions promise nothing.
    """
    if _interface(built_against) != _interface(installed):
        raise ImportError(
            f"amp_ext was built against torch {built_against}, but torch {installed} is installed; "
            f"rebuild it from its source tree with: {REBUILD}"
        )


def _interface(version: str) -> str:
    """2.14+cu130 for 2.14.1+cu130, and a development version as it is."""
    return re.sub(r"^(\d+\.\d+)\.\d+(?=$|\+(cpu$|cu\d+$))", r"\1", version)


if find_spec("amp_ext._C") is None or find_spec("amp_ext._build_info") is None:
    raise ImportError(
        f"amp_ext in {Path(__file__).parent} has no extension module; start Python outside of the "
        f"source tree to find an installed one, or build it from the source tree with: {REBUILD}"
    )

from amp_ext import _build_info  # noqa: E402

check_build(_build_info.TORCH_VERSION, torch.__version__)

from amp_ext import _C  # noqa: E402  (a module that was built against another torch cannot be loaded)

__all__ = ["_C", "check_build"]
