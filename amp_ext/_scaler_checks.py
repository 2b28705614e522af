"""Checks of what the scaler is given."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState


def replaces(method: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether a subclass or the user has put another method in the place of ours."""
    return getattr(method, "__func__", None) is not ours


def check_options(min_scale: float | None, max_scale: float | None, hysteresis: int) -> None:
    if min_scale is not None and not 0 <= min_scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"GradScaler: min_scale must be a finite float32, not negative, got {min_scale}"
        )
    if max_scale is not None and not max_scale > 0:
        raise ValueError(f"GradScaler: max_scale must be positive, got {max_scale}")
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"GradScaler: min_scale must be at most max_scale, got {min_scale} and {max_scale}"
        )
    if not isinstance(hysteresis, int) or not 1 <= hysteresis < 2**31:
        raise ValueError(
            f"GradScaler: hysteresis must be an integer from 1 to 2**31 - 1, got {hysteresis!r}"
        )


def checked_max_norm(max_norm: Any) -> float:
    """The number that torch takes it for."""
    number = float(max_norm)
    if not number >= 0:
        raise ValueError(
            "GradScaler.clip_grad_norm_: max_norm must be a number that is not negative, "
            f"got {max_norm}"
        )
    return number


def check_may_clip(state: Mapping[str, Any]) -> None:
    """Raises torch's errors of ``unscale_`` for an optimizer that is stepped or clipped."""
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError("clip_grad_norm_() is being called after step().")
    if state.get("clipped"):
        raise RuntimeError(
            "clip_grad_norm_() has already been called on this optimizer since the last update()."
        )
