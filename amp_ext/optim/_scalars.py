"""Hand the scalars of a step from a scaler to this package's optimizers."""

from typing import NamedTuple

from torch import Tensor


class StepScalars(NamedTuple):
    """Hold the scalars of a step: float32 tensors of shape () on the scale's device.

    Attributes:
        found_inf: not 0 if the step is to be skipped.
        inv_scale: the factor that unscales gradients; None for unscaled gradients.
        norm: the norm of the unscaled gradients; None for gradients that are not to be clipped.
        max_norm: the limit of the norm.
    """

    found_inf: Tensor
    inv_scale: Tensor | None = None
    norm: Tensor | None = None
    max_norm: float | None = None
