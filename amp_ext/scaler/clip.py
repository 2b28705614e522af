"""A clip of an optimizer's gradients, done or left to its step."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.scaler.optimizers import Handover
from amp_ext.scaler.parameters import params_of
from amp_ext.scaler.processes import is_flattened, is_split, several


class Clip(NamedTuple):
    """Attributes:
    norm: of the unscaled gradients, a float32 tensor of shape ().
    max_norm: what it is clipped to.
    handover: who does that.
    scaled: whether unscaling is left to the optimizer's step too.
    version: of the norm, which users get too.
    """

    norm: Tensor | None
    max_norm: float
    handover: Handover
    scaled: bool
    version: int = 0

    @property
    def by_step(self) -> bool:
        """Whether clipping is left to the optimizer's step."""
        return self.handover is not Handover.HOST

    def inverse_coefficient(self) -> Tensor:
        """What gradients are divided by: max(1, (norm + 1e-6) / max_norm). By infinity, and so
        they become 0, where max_norm is 0 and where the quotient is beyond float32."""
        return (self.norm + 1e-6).div_(self.max_norm).clamp_(min=1.0)


SCALED = Clip(None, 0.0, Handover.HOST, scaled=True)
UNSCALED = Clip(None, 0.0, Handover.HOST, scaled=False)


def check_unsplit(optimizer: Optimizer) -> None:
    """Raise for parameters that FSDP1 has split: torch's code would take a part of the norm."""
    if several() and any(is_flattened(p) and is_split(p) for p in params_of(optimizer)):
        raise RuntimeError(
            "GradScaler.clip_grad_norm_: each process has a part of FullyShardedDataParallel's "
            "parameters, of which only an enabled scaler with norm_type=2 takes the whole norm: "
            "call unscale_(optimizer), and clip_grad_norm_ of the FullyShardedDataParallel module"
        )


def clip_as_torch(
    optimizer: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    params = list(params_of(optimizer))
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    # The number in a DTensor may be of this process alone.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
