"""The oracle: what each op of amp_ext.ops computes, in plain torch.

The functions have the names and arguments of the ops, whose docstrings say what those are, write to
the same arguments, and work on tensors of any device. They are made to be read, not to be fast, and
assume valid arguments: the errors for invalid ones belong to the ops.

Rounding. Arithmetic is done in fp64 and rounded to the type in which the op does it. The product
of two fp32 numbers is exact in fp64 (24 + 24 significant bits in 53, exponents well within range),
so rounding it once to fp32 is the correctly rounded fp32 product, subnormal results included. For
fp16 and bf16 gradients the op rounds that fp32 product a second time, to the type of the gradient;
rounding the exact product straight to fp16 would differ in rare cases, so it is not done here
either. `unscale_`, `check_finite`, `cast_` and `update_scale_` are therefore exact: an op agrees
with them bit for bit (NaN payloads apart). `grad_norm` carries the rounding error of a sum in fp64.

Matrix products return new tensors and are differentiable any number of times; their gradients are
computed in fp64 too and rounded once to the dtype of their tensor. An op accumulates in fp32 in an
order of its own, so it agrees with them to the rounding error of such sums, and bit for bit where
every partial sum is representable in fp32, as with small integers.
"""

from amp_ext.reference.gemm import *  # noqa: F403
from amp_ext.reference.lists import *  # noqa: F403
from amp_ext.reference.optim import *  # noqa: F403
