"""Find Triton without importing it: the import takes a second."""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

LEAST_VERSION = (3, 6)


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:  # a folder that happens to be called triton
        return None
    try:
        return version("triton")
    except PackageNotFoundError:  # a build of the user's own
        return "of unknown version"


def why_not_triton() -> str:
    """Return why the Triton kernels cannot run, with a remedy, or ""."""
    installed = triton_version()
    if installed is None:
        return "Triton is not installed; pip install triton"
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers and tuple(map(int, numbers.groups())) < LEAST_VERSION:
        return f"Triton {installed} is too old; pip install 'triton>=3.6'"
    if torch.version.hip:
        return "the Triton kernels are for NVIDIA's GPUs"
    return ""


def is_interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
