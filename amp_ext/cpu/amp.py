"""The names and arguments of ``torch.cpu.amp``, without its warnings that it is deprecated.

Write ``from amp_ext.cpu.amp import GradScaler, autocast`` for ``from torch.cpu.amp import ...``.
"""

from functools import partialmethod

import torch

from amp_ext.autocast.regions import autocast as _autocast
from amp_ext.scaler import GradScaler as _GradScaler

__all__ = ["GradScaler", "autocast"]


class autocast(_autocast):
    """:class:`amp_ext.autocast` for "cpu"."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


class GradScaler(_GradScaler, torch.cpu.amp.GradScaler):
    """:class:`amp_ext.GradScaler` for "cpu", with its keyword-only options."""

    __init__ = partialmethod(_GradScaler.__init__, "cpu")
