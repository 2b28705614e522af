"""Replace torch's autocast and scaler in programs that name them."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler as TorchsScaler

from amp_ext._library import _C
from amp_ext.autocast.regions import tag_programs
from amp_ext.cpu import amp as cpu_amp
from amp_ext.cuda import amp as cuda_amp
from amp_ext.scaler import GradScaler

_OURS = {
    TorchsScaler: GradScaler,
    torch.cuda.amp.GradScaler: cuda_amp.GradScaler,
    torch.cpu.amp.GradScaler: cpu_amp.GradScaler,
}
_lock = threading.Lock()
_our_init: Callable[..., None] | None = None  # of torch.amp.GradScaler, while it makes ours


def install(*, scaler: bool = False) -> None:
    """Run the products of all ``torch.autocast`` regions on this package's GEMM.

    The regions of every thread and library then work as :class:`amp_ext.autocast` does, until
    :func:`uninstall`. A second call takes nothing back.

    Do not call it between the forward and the backward pass of a checkpoint: both must do the same.
    Programs that were compiled before stay as they were compiled.

    Args:
        scaler: whether ``torch.amp.GradScaler(...)`` makes an :class:`amp_ext.GradScaler` from now
            on, and takes its options. ``torch.cuda.amp.GradScaler`` and
            ``torch.cpu.amp.GradScaler`` make one too, without its options. A library may have
            imported them under any name. These classes stay the same, and the new scaler is an
            instance of them. Existing scalers stay torch's, and so do scalers of subclasses, such
            as ``ShardedGradScaler``. New scalers stay ours after :func:`uninstall`.
    """
    global _our_init
    with _lock:
        if scaler and (_our_init is None or TorchsScaler.__init__ is not _our_init):
            _our_init = _become_ours(TorchsScaler.__init__)
            TorchsScaler.__init__ = _our_init
        _C.install()
        tag_programs()


def uninstall() -> None:
    """Undo :func:`install`, under the same conditions.

    Regions of :class:`amp_ext.autocast` keep working.
    """
    global _our_init
    with _lock:
        # A constructor that other code has put around ours stays, and makes torch's scalers.
        if _our_init is not None and TorchsScaler.__init__ is _our_init:
            TorchsScaler.__init__ = _our_init.__wrapped__  # type: ignore[attr-defined]
        _our_init = None
        _C.uninstall()
        tag_programs()


def is_installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return _C.is_installed()


def _become_ours(torchs_init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that turns a new scaler of torch's into ours.

    ``__new__`` cannot do so: it also runs for scalers of torch's that are loaded or copied.
    """

    @functools.wraps(torchs_init)
    def __init__(self: TorchsScaler, *args: Any, **kwargs: Any) -> None:
        ours = _OURS.get(type(self)) if _our_init is not None else None
        if ours is None:
            return torchs_init(self, *args, **kwargs)
        self.__class__ = ours
        GradScaler.__init__(self, *args, **kwargs)

    return __init__
