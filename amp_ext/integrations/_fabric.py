"""Extend Fabric and its precision plugin, under any name of its package."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_ext.autocast import autocast
from amp_ext.integrations import check_alone
from amp_ext.integrations._lightning import WithScaler, unwrapped


class InFabric(WithScaler):
    __doc__ = WithScaler.__doc__

    def forward_context(self) -> autocast:
        return self._region()

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
