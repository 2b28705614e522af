"""Warn at the caller's line, outside of this package and of torch."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_INNER = ("amp_ext", "torch", "contextlib", "functools")
_Said = list[warnings.WarningMessage]
_lock = threading.Lock()
"""The lock of catch_warnings: only one thread at a time may enter it."""


def warn(text: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the innermost caller outside of these packages."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


@contextmanager
def _caught() -> Iterator[_Said]:
    with _lock, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


@contextmanager
def torchs_warnings() -> Iterator[None]:
    """Repeat the warnings of torch at the caller's line."""
    with _caught() as said:
        yield
    for warning in said:
        warn(warning.message, warning.category)


_regions: dict[tuple[str, torch.dtype], tuple[bool, _Said]] = {}
"""By device type and dtype: whether torch enables a region, and its warnings if not."""


def torchs_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> torch.autocast:
    """Return torch's region, with its warnings at the caller's line.

    Only the first region for each dtype catches warnings: a caught one makes Python repeat others.
    """
    if enabled and isinstance(device_type, str):
        key = device_type, dtype or torch.get_autocast_dtype(device_type)
        said: _Said = []
        if key not in _regions:
            with _caught() as said:
                enabled = torch.autocast(*key)._enabled
            _regions[key] = enabled, [] if enabled else said
        enabled, repeated = _regions[key]
        for warning in repeated or said:
            warn(warning.message, warning.category)
    return torch.autocast(device_type, dtype, enabled, cache_enabled)
