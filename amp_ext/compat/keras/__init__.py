"""The names of ``keras.mixed_precision`` (Keras 3), for modules and optimizers of torch."""

from amp_ext.compat.keras.optimizer import LossScaleOptimizer
from amp_ext.compat.keras.policy import Policy, apply_policy, global_policy, set_global_policy

set_dtype_policy = set_global_policy

__all__ = [
    "LossScaleOptimizer",
    "Policy",
    "apply_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]
