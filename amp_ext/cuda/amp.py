"""The names and arguments of ``torch.cuda.amp``, without its warnings that it is deprecated.

Write ``from amp_ext.cuda.amp import GradScaler, autocast`` for ``from torch.cuda.amp import ...``.
"""

from functools import partial, partialmethod

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


custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")
