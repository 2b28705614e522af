"""Extend Fabric and the precision plugins of Lightning, under any names of the packages."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_ext.autocast import autocast
from amp_ext.integrations import Guard, check_alone, has_gradients_of, unscaled_optimizers
from amp_ext.scaler import GradScaler


class WithScaler:
    """Extend ``MixedPrecision`` by :class:`amp_ext.GradScaler` and :class:`amp_ext.autocast`.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: type of the devices, as in "cuda".
        scaler: a new one by default, and none for "bf16-mixed". With "bf16-mixed" it may be a
            guard, ``GradScaler(device, init_scale=1.0, dynamic=False)``.
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: GradScaler | None = None
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, None if precision == "bf16-mixed" else scaler)
        self.scaler = scaler  # Lightning refuses one for bfloat16
        if precision == "bf16-mixed" and type(scaler) is GradScaler and not scaler._dynamic:
            scaler.__class__ = Guard  # loads and saves no scale

    def forward_context(self) -> autocast:
        is_bfloat16 = self.precision == "bf16-mixed"
        return autocast(self.device, torch.bfloat16 if is_bfloat16 else torch.float16)

    autocast_context_manager = forward_context  # the Trainer's name


class InTrainer(WithScaler):
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip unscaled gradients, also in manual optimization. The scaler clips by norm."""
        if self.scaler is None or clip_val <= 0:
            return super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        own = unwrapped(optimizer)
        if self.scaler._scale is None and has_gradients_of(own, ()):  # nothing has been scaled
            return
        if gradient_clip_algorithm == "norm":
            self.scaler.clip_grad_norm_(own, clip_val)
            return
        if self.scaler._state_of(own).is_scaled:
            self.scaler.unscale_(own)
        self.clip_grad_by_value(own, clip_val)

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        check_alone(self.scaler, optimizer)
        if id(optimizer) not in unscaled_optimizers(self.scaler):
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            if self.scaler is not None:  # no step was made if training_step returned None
                self.scaler._per_optimizer_states.pop(id(optimizer), None)
            return result
        closure()
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer within Lightning's, as in manual optimization and Fabric."""
    return optimizer.optimizer if hasattr(optimizer, "_strategy") else optimizer


class InFabric(WithScaler):
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        check_alone(self.scaler, optimizer)
        return super().optimizer_step(optimizer, **kwargs)


class ClipsByScaler:
    """``Fabric`` with norms clipped by the scaler of its plugin."""

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool | None = None,
    ) -> Tensor | None:
        """Clip as Lightning, with error_if_nonfinite False by default where the scaler clips."""
        plugin = self.strategy.precision
        by_norm = clip_val is None and max_norm is not None and norm_type == 2
        if by_norm and isinstance(plugin, InFabric) and plugin.scaler is not None:
            return plugin.scaler.clip_grad_norm_(
                unwrapped(optimizer), max_norm, error_if_nonfinite=bool(error_if_nonfinite)
            )
        options = {} if error_if_nonfinite is None else {"error_if_nonfinite": error_if_nonfinite}
        return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, **options)


def extended(module: str, fabric: str, trainer: str) -> list[type]:
    """Return Fabric, its plugin and the Trainer's, as classes of a module, from two packages."""
    plugins = [import_module(f"{package}.plugins").MixedPrecision for package in (fabric, trainer)]
    bases = {
        "Fabric": (ClipsByScaler, import_module(fabric).Fabric),
        "FabricMixedPrecision": (InFabric, plugins[0]),
        "MixedPrecision": (InTrainer, plugins[1]),  # checkpoints know torch's scaler by this name
    }
    return [type(name, pair, {"__module__": module}) for name, pair in bases.items()]
