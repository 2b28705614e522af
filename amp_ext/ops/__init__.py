"""Provide ops on lists of gradients and parameters, and matrix products.

Gradients are lists of strided tensors on one device. A list may mix float16, bfloat16, float32 and
float64 tensors of any shape, alignment and number. Empty lists and empty tensors are fine.
``found_inf`` and the other one-element tensors may have shape () or (1,), on the same device.

Every op checks all of its arguments first: when it raises, nothing has been written. It raises
NotImplementedError for an element type or layout that it does not support, and RuntimeError for a
wrong shape, dtype or device. Errors name the op, the argument, the expected and the actual value.

The attribute ``reference`` of an op is the same function in plain torch, made to be read. It takes
valid arguments on one device.
"""

from amp_ext.ops.gemm import *  # noqa: F403
from amp_ext.ops.gemm import __all__ as GEMM_OPS
from amp_ext.ops.lists import *  # noqa: F403
from amp_ext.ops.lists import __all__ as _LIST_OPS
from amp_ext.ops.optim import *  # noqa: F403
from amp_ext.ops.optim import __all__ as _OPTIM_OPS

# They register the ops with torch.
from amp_ext.ops import _checkpoint, _flops, _sharding  # noqa: F401  # isort: skip

LIST_OPS = [*_LIST_OPS, *_OPTIM_OPS]

__all__ = [*LIST_OPS, *GEMM_OPS]
