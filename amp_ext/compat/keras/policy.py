"""Set the dtypes of computation in modules, by policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from amp_ext.compat.casting import HALVES, Cast, Casts, check_module, give_casts

Module = TypeVar("Module", bound=nn.Module)

_CASTS = {
    "float32": Casts(torch.float32, inputs=Cast(HALVES, torch.float32)),
    "mixed_float16": Casts(torch.float16),
    "mixed_bfloat16": Casts(torch.bfloat16),
}


@dataclass(frozen=True)
class Policy:
    """``keras.DTypePolicy``, also ``keras.mixed_precision.Policy``, with float32 variables.

    Attributes:
        name: "float32", "mixed_float16" or "mixed_bfloat16".

    Raises:
        ValueError: another name. "float16", for example, would keep variables in float16.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _CASTS:
            expected = ", ".join(map(repr, _CASTS))
            mixed = f"mixed_{self.name}"
            hint = f" Variables stay float32: write {mixed!r}." if mixed in _CASTS else ""
            raise ValueError(f"Policy: name: expected one of {expected}, got {self.name!r}.{hint}")

    @property
    def compute_dtype(self) -> str:
        return self.name.removeprefix("mixed_")

    @property
    def variable_dtype(self) -> str:
        return "float32"


_global_policy = Policy("float32")


def set_global_policy(policy: str | Policy) -> None:
    """Set the default policy of :func:`apply_policy`, in every thread.

    The function stands for ``keras.mixed_precision.set_global_policy`` and
    ``keras.config.set_dtype_policy``. Modules of torch, unlike layers of Keras, do not read the
    global policy.

    Raises:
        ValueError: a name that :class:`Policy` does not take.
    """
    global _global_policy
    _global_policy = _as_policy(policy)


def global_policy() -> Policy:
    """Return the global policy; "float32" at the start."""
    return _global_policy


def _as_policy(policy: str | Policy | None) -> Policy:
    if policy is None:
        return _global_policy
    return policy if isinstance(policy, Policy) else Policy(policy)


def apply_policy(
    module: Module,
    policy: str | Policy | None = None,
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
    traces it. ``module.dtype_policy`` is the policy; a second call changes it.

    Args:
        module: a module with float32 parameters.
        policy: a :class:`Policy` or its name; the global policy when None.
        only: classes. Instances of them among the module and its submodules get the policy.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, or has another ``forward`` than its class.
        ValueError: 16-bit parameters; no module is of the classes in ``only``; the ``out_proj`` of
            ``nn.MultiheadAttention``, since it is never called. No module has changed then.
    """
    policy = _as_policy(policy)
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
        give_casts(each, _CASTS[policy.name])
        each.dtype_policy = policy
    return module


def _keep_from_fast_paths(module: nn.Module, args: Any) -> None:
    """Make torch's Transformer layers call the module instead of reading its parameters."""
