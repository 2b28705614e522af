"""What is known of Triton without importing it, which takes a second."""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def triton_version() -> str | None:
    """Of the installed Triton; None where there is none."""
    if find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:  # as of a build of its own within torch's
        return "of unknown version"


def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
