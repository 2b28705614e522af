"""Keras's names for mixed precision, for modules and optimizers of torch.

What Keras programs import from ``keras.mixed_precision`` they import from
``amp_ext.keras.mixed_precision``, or from here.
"""

from amp_ext.keras import mixed_precision
from amp_ext.keras.mixed_precision import (
    DTypePolicy,
    LossScaleOptimizer,
    Policy,
    apply_policy,
    dtype_policy,
    global_policy,
    set_dtype_policy,
    set_global_policy,
)

__all__ = [
    "DTypePolicy",
    "LossScaleOptimizer",
    "Policy",
    "apply_policy",
    "dtype_policy",
    "global_policy",
    "mixed_precision",
    "set_dtype_policy",
    "set_global_policy",
]
