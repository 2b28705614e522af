"""What the scaler changes of Fabric and its plugin, under any name of the package."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_ext.autocast import autocast
from amp_ext.integrations import check_alone
from amp_ext.integrations._lightning import WithScaler, unwrapped


class InFabric(WithScaler):
    """Gradients of optimizers that unscale in their step may be clipped."""

    def forward_context(self) -> autocast:
        return self._region()

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        return self.scaler.clip_grad_norm_(
            optimizer, max_norm, error_if_nonfinite=error_if_nonfinite
        )

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
        """As Lightning's; but where the scaler clips, which skips the step after an overflow, it
        takes ``error_if_nonfinite=True`` to make that an error."""
        plugin = self.strategy.precision
        by_norm = clip_val is None and max_norm is not None and norm_type == 2
        if by_norm and isinstance(plugin, InFabric) and plugin.scaler is not None:
            return plugin.clip_norm(unwrapped(optimizer), max_norm, bool(error_if_nonfinite))
        asked_for = {} if error_if_nonfinite is None else {"error_if_nonfinite": error_if_nonfinite}
        return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, **asked_for)
