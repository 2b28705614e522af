"""Check a scaler's arguments and loaded states."""

import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch

OWN_ENTRY = "amp_ext"

_FLOAT32_MAX = torch.finfo(torch.float32).max
# The numbers that torch's attributes, and the tensors of this package, can hold.
_TORCHS_ENTRIES = {
    "scale": (float, -_FLOAT32_MAX, _FLOAT32_MAX),
    "growth_factor": (float, -math.inf, math.inf),
    "backoff_factor": (float, -math.inf, math.inf),
    "growth_interval": (int, -(2**63), 2**63 - 1),
    "_growth_tracker": (int, -(2**31), 2**31 - 1),
}
_COUNTERS = {
    "skipped_steps": (int, 0, 2**63 - 1),
    "hysteresis": (int, 1, 2**31 - 1),
    "hysteresis_tracker": (int, -(2**31), 2**31 - 1),
}


def check_bounds(min_scale: Any, max_scale: Any, skip_above_norm: Any) -> None:
    """Raise for bounds of the scale or of norms that make no sense."""
    if min_scale is not None and not 0 <= min_scale <= _FLOAT32_MAX:
        raise ValueError(
            f"GradScaler: min_scale must be a finite float32, not negative, got {min_scale}"
        )
    if max_scale is not None and not (max_scale > 0 and max_scale >= (min_scale or 0)):
        raise ValueError(
            "GradScaler: max_scale must be positive, and at least min_scale, got "
            f"{max_scale} and {min_scale}"
        )
    if skip_above_norm is not None and not skip_above_norm > 0:
        raise ValueError(f"GradScaler: skip_above_norm must be positive, got {skip_above_norm}")


def checked_count(name: str, value: Any) -> int:
    """Return a positive int32 option."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if not 1 <= count < 2**31:
        raise ValueError(
            f"GradScaler: {name} must be an integer from 1 to 2**31 - 1, got {value!r}"
        )
    return count


def checked_state(state_dict: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
    """Return torch's entries of a state, and the counters in it."""
    own = state_dict.get(OWN_ENTRY) or {}
    counters = {key: _checked(key, own[key], *_COUNTERS[key]) for key in _COUNTERS if key in own}
    entries = _TORCHS_ENTRIES if state_dict else {}
    torchs = {key: _checked(key, state_dict[key], *limits) for key, limits in entries.items()}
    return torchs, counters


def _checked(
    key: str, value: Any, kind: type[float | int], lowest: float, highest: float
) -> float | int:
    """Return the number of an entry. Floats may be infinite or NaN."""
    with suppress(AttributeError, RuntimeError, ValueError):  # as of tensors without one value
        value = value.item()
    name = f"GradScaler.load_state_dict: {key!r} must be"
    if not isinstance(value, Real):
        raise TypeError(f"{name} a number, got {type(value).__name__}")
    fits = lowest <= value <= highest
    if kind is int:
        fits = fits and value == int(value)
    if not fits and (kind is int or abs(value) < math.inf):
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} {what} from {lowest} to {highest}, got {value!r}")
    return kind(value)
