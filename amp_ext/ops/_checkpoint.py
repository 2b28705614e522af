"""Apply checkpoint policies to this package's products as to torch's.

A selective checkpoint calls its policy with torch's op for the product first. A policy that names
``aten.mm`` so saves this package's products too.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

_UNDECIDED = (False, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)


def _as_torchs(
    a: Tensor,
    b: Tensor,
    *_: Any,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    **__: Any,
) -> tuple[Any, ...]:
    """Return torch's op for the product, and its arguments."""
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    addends = [term for term in (bias, c) if term is not None][:1]
    if a.dim() > 2 and b.dim() > 2:
        op = torch.ops.aten.baddbmm if addends else torch.ops.aten.bmm
        return op.default, *addends, a.flatten(0, -3), b.flatten(0, -3)
    if b.dim() > 2:  # A @ B of a shared A is the transpose of B.T @ A.T
        a, b = b.mT, a.mT
    op = torch.ops.aten.addmm if addends else torch.ops.aten.mm
    return op.default, *addends, a.flatten(0, -2), b


def _dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    asked = getattr(mode, "policy_fn", None)
    if asked is None:  # a recomputation; this torch remembers the answers of the policy
        return mode.__torch_dispatch__(func, types, args, kwargs)

    def policy_fn(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        of_torchs = asked(context, *_as_torchs(*args, **kwargs))
        return asked(context, func, *args, **kwargs) if of_torchs in _UNDECIDED else of_torchs

    mode.policy_fn = policy_fn
    try:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    finally:
        mode.policy_fn = asked


with suppress(AttributeError):  # a torch with other modes calls policies with gemm
    for _mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
        torch.library.register_torch_dispatch("amp_ext::gemm", _mode, _dispatch)
