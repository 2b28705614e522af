"""What programs that name torch's autocast and scaler, and not this package's, are given."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler as TorchsScaler

from amp_ext._library import _C
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
    """Lets every ``torch.autocast`` region, of every thread and library, run its matrix products as
    :class:`amp_ext.autocast` does, until :func:`uninstall`. A second call takes nothing back.

    Not to be called between a checkpoint's forward and backward pass, which have to do the same.
    Programs compiled before go on as they were compiled.

    Args:
        scaler: also, from now on, ``torch.amp.GradScaler(...)`` makes an
            :class:`amp_ext.GradScaler`, whose options it takes too, and so do, but for the
            options, ``torch.cuda.amp.GradScaler`` and ``torch.cpu.amp.GradScaler``, under whichever
            name a library has imported them. They stay the classes that they are, of which the new
            scaler is an instance. Scalers that exist already stay torch's, as do those of
            subclasses, such as ``ShardedGradScaler``; scalers made in the meantime stay ours after
            :func:`uninstall`.
    """
    with _lock:
        if scaler:
            _install_scaler()
        _C.install()


def uninstall() -> None:
    """Undoes :func:`install`; the same holds. Regions of :class:`amp_ext.autocast` keep working."""
    with _lock:
        _uninstall_scaler()
        _C.uninstall()


def is_installed() -> bool:
    """Whether :func:`install` is in effect."""
    return _C.is_installed()


def _install_scaler() -> None:
    global _our_init
    if _our_init is None or TorchsScaler.__init__ is not _our_init:
        _our_init = _become_ours(TorchsScaler.__init__)
        TorchsScaler.__init__ = _our_init


def _uninstall_scaler() -> None:
    global _our_init
    # Where somebody else has put a constructor around ours, it stays, and makes torch's scalers.
    if _our_init is not None and TorchsScaler.__init__ is _our_init:
        TorchsScaler.__init__ = _our_init.__wrapped__  # type: ignore[attr-defined]
    _our_init = None


def _become_ours(torchs_init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that makes a new scaler of torch's one of ours. ``__new__`` cannot do so: it
    also runs for scalers of torch's that are loaded or copied."""

    @functools.wraps(torchs_init)
    def __init__(self: TorchsScaler, *args: Any, **kwargs: Any) -> None:
        ours = _OURS.get(type(self)) if _our_init is not None else None
        if ours is None:
            return torchs_init(self, *args, **kwargs)
        self.__class__ = ours
        GradScaler.__init__(self, *args, **kwargs)

    return __init__
