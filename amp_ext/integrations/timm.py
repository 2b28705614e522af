"""Put the scaler into timm: ``NativeScaler()`` in place of ``timm.utils.NativeScaler``."""

from collections.abc import Iterable
from typing import Any

import timm.utils
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.integrations import has_gradients_of
from amp_ext.scaler import GradScaler
from amp_ext.scaler.optimizers import params_of

__all__ = ["NativeScaler"]


class NativeScaler(timm.utils.NativeScaler):
    """Replace timm's scaler by :class:`amp_ext.GradScaler`.

    The scaler also clips the norm of all gradients of an optimizer.

    Args:
        device: type of the device, as in "cuda".
        options: of :class:`amp_ext.GradScaler`.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        self._scaler = GradScaler(device, **options)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        scaler = self._scaler
        scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            parameters = list(params_of(optimizer) if parameters is None else parameters)
            if clip_mode == "norm" and has_gradients_of(optimizer, parameters):
                scaler.clip_grad_norm_(optimizer, clip_grad)
            else:
                scaler.unscale_(optimizer)
                timm.utils.dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        scaler.step(optimizer)
        scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped. Synchronises with the device."""
        return self._scaler.step_was_skipped
