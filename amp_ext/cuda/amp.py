"""The names and arguments of ``torch.cuda.amp``, without its warnings that it is deprecated.

Write ``from amp_ext.cuda.amp import GradScaler, autocast`` for ``from torch.cuda.amp import ...``.
"""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch.cuda.amp import amp_definitely_not_available

from amp_ext.autocast.regions import autocast as _autocast
from amp_ext.scaler import GradScaler as _GradScaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


class autocast(_autocast):
    """:class:`amp_ext.autocast` for "cuda"."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class GradScaler(_GradScaler, torch.cuda.amp.GradScaler):
    """:class:`amp_ext.GradScaler` for "cuda", with its keyword-only options."""

    __init__ = partialmethod(_GradScaler.__init__, "cuda")


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
) -> Callable[..., Any]:
    """``torch.amp.custom_fwd`` for "cuda"."""
    return torch.amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.amp.custom_bwd`` for "cuda"."""
    return torch.amp.custom_bwd(bwd, device_type="cuda")
