"""The names of ``keras.mixed_precision`` (Keras 3), and of ``keras.config`` for policies."""

from amp_ext.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_ext.keras.modules import apply_policy
from amp_ext.keras.policy import Policy, global_policy, set_global_policy

DTypePolicy = Policy
dtype_policy = global_policy
set_dtype_policy = set_global_policy

__all__ = [
    "DTypePolicy",
    "LossScaleOptimizer",
    "Policy",
    "apply_policy",
    "dtype_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]
