"""What a scaler hands to the steps of this package's optimizers."""

from typing import NamedTuple

from torch import Tensor


class StepScalars(NamedTuple):
    """Scalars of a step, float32 tensors of shape () on the scale's device.

    Attributes:
        found_inf: not 0 if the step is to be skipped.
        inv_scale: what gradients are multiplied by; None where they are unscaled already.
        norm: of the unscaled gradients, where they are to be clipped.
        max_norm: what the norm is clipped to.
    """

    found_inf: Tensor
    inv_scale: Tensor | None = None
    norm: Tensor | None = None
    max_norm: float | None = None
