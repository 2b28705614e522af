"""The ops: multi-tensor kernels of gradient scaling, casts and optimizers, and matrix products.

Gradients are lists of strided tensors on one device, of any mix of float16, bfloat16, float32 and
float64, of any shape, alignment and number; empty lists and empty tensors are fine. ``found_inf``
and the other one-element tensors may have shape () or (1,) and lie on the same device.

Every op checks all of its arguments first: when it raises, nothing has been written. It raises
NotImplementedError for an element type or layout that it does not support, RuntimeError for a wrong
shape, dtype or device, with the op, the argument, what was expected and what came.
"""

from amp_ext.ops.gemm import *  # noqa: F403
from amp_ext.ops.gemm import __all__ as GEMM_OPS
from amp_ext.ops.lists import *  # noqa: F403
from amp_ext.ops.lists import __all__ as _OF_GRADIENTS
from amp_ext.ops.optim import *  # noqa: F403
from amp_ext.ops.optim import __all__ as _OF_OPTIMIZERS

LIST_OPS = [*_OF_GRADIENTS, *_OF_OPTIMIZERS]

__all__ = [*LIST_OPS, *GEMM_OPS]
