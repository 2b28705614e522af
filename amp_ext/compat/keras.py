"""Set the dtypes of computation in modules, by the policies of Keras 3."""

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from amp_ext.compat.casting import HALVES, Cast, Casts, check_module, give_casts

__all__ = ["apply_policy"]

Module = TypeVar("Module", bound=nn.Module)

_CASTS = {
    "float32": Casts(torch.float32, inputs=Cast(HALVES, torch.float32)),
    "mixed_float16": Casts(torch.float16),
    "mixed_bfloat16": Casts(torch.bfloat16),
}


def apply_policy(
    module: Module,
    policy: str,
    *,
    only: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
) -> Module:
    """Set the policy of a module, like a layer's ``dtype=`` in Keras.

    Under "mixed_float16" and "mixed_bfloat16", ``forward`` runs in a region of
    :class:`amp_ext.autocast`. Under "float32", ``forward`` runs without autocast, and its 16-bit
    inputs are cast to float32. Other inputs, and outputs, stay as they are. Submodules without
    policies of their own follow.

    The module stays the same object, with the same parameters, hooks and state dict. Its class
    becomes a subclass of its class. Copies and pickles have the policy, and ``torch.compile``
    traces it. ``module.dtype_policy`` is the policy's name; a second call changes it.

    Args:
        module: a module with float32 parameters.
        policy: "float32", "mixed_float16" or "mixed_bfloat16".
        only: classes. Instances of them among the module and its submodules get the policy.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, has another ``forward`` than its class, or had
            parametrizations before its first policy.
        ValueError: another policy, as "float16", which would keep variables in float16; 16-bit
            parameters; no module is of the classes in ``only``; the ``out_proj`` of
            ``nn.MultiheadAttention``, since it is never called. No module has changed then.
    """
    if policy not in _CASTS:
        expected = ", ".join(map(repr, _CASTS))
        mixed = f"mixed_{policy}"
        hint = f" Variables stay float32: write {mixed!r}." if mixed in _CASTS else ""
        raise ValueError(f"apply_policy: policy: expected one of {expected}, got {policy!r}.{hint}")
    if not isinstance(module, nn.Module):
        raise TypeError(f"apply_policy: module: expected a torch.nn.Module, got {module!r}.")
    chosen = [module] if only is None else [m for m in module.modules() if isinstance(m, only)]
    if not chosen:
        raise ValueError(f"apply_policy: {type(module).__name__} has no module of only={only}.")
    for each in chosen:
        check_module("apply_policy", each)
        if isinstance(each, NonDynamicallyQuantizableLinear):
            raise ValueError(
                "apply_policy: nn.MultiheadAttention reads the parameters of out_proj, and never "
                "calls it. Give the policy to the attention."
            )
    for each in chosen:
        if not hasattr(each, "dtype_policy"):
            each.register_forward_pre_hook(_keep_from_fast_paths)
        give_casts(each, _CASTS[policy])
        each.dtype_policy = policy
    return module


def _keep_from_fast_paths(module: nn.Module, args: Any) -> None:
    """Make torch's Transformer layers call the module instead of reading its parameters."""
