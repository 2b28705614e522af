"""Warn at the caller's line, outside of this package and of torch."""

import sys
import warnings

_INNER = ("amp_ext", "torch", "contextlib", "functools")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the innermost caller outside of these packages."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
