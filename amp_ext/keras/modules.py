"""Modules that compute as a policy says."""

from __future__ import annotations

import copyreg
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_leaves, tree_map

from amp_ext.keras.policy import Policy, as_policy, region_of

Module = TypeVar("Module", bound=nn.Module)
_LOW = torch.float16, torch.bfloat16


def apply_policy(
    module: Module,
    policy: str | Policy | None = None,
    *,
    only: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
) -> Module:
    """The counterpart of a layer's ``dtype=`` in Keras: from now on the module computes as the
    policy says, whatever region it is called in. Modules within it follow, but for those that have
    policies of their own.

    Under "mixed_float16" and "mixed_bfloat16" its ``forward`` runs in a region of
    :class:`amp_ext.autocast`; under "float32" without autocast, and float16 and bfloat16 tensors
    among its inputs are cast to float32. Other inputs, and outputs, stay as they are.

    The module stays the object that it is, with the same parameters, hooks and state dict; its
    class becomes a subclass of its class. Copies and pickles have the policy, and
    ``torch.compile`` traces it. ``module.dtype_policy`` is the policy; a second call changes it.

    Args:
        module: whose floating-point parameters are float32.
        policy: a :class:`Policy` or its name; the global policy when None.
        only: classes. Instances of them among the module and its submodules are given the policy.

    Returns:
        ``module``.

    Raises:
        TypeError: no module, or one of TorchScript or torch.fx, whose code is not its class's.
        ValueError: parameters that are not float32; nothing is of the classes in ``only``; a
            module whose ``forward`` would not be called: that of ``torch.compile``, or the
            ``out_proj`` of ``nn.MultiheadAttention``. No module has changed then.
    """
    policy = as_policy(policy)
    if not isinstance(module, nn.Module):
        raise TypeError(f"apply_policy: module must be a torch.nn.Module, got {module!r}")
    chosen = [module] if only is None else [m for m in module.modules() if isinstance(m, only)]
    if not chosen:
        raise ValueError(f"apply_policy: {type(module).__name__} has no module of only={only}")
    for each in chosen:
        _check(each)
    for each in chosen:
        if not isinstance(each, _WithPolicy):
            each.__class__ = _with_policy(type(each))
            each.register_forward_pre_hook(_keep_from_fast_paths)
        each._dtype_policy = policy.name
    return module


def _check(module: nn.Module) -> None:
    name = type(module).__name__
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise TypeError(
            f"apply_policy: the code of a {name} is not its class's: give the policy to the module "
            "that it is made of"
        )
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ValueError(
            "apply_policy: nn.MultiheadAttention never calls its out_proj, whose parameters it "
            "reads: give the policy to the attention"
        )
    if "forward" in vars(module):
        raise ValueError(
            f"apply_policy: this {name} has a forward of its own, which its class cannot change: "
            "give the policy to the module before it is wrapped, as by torch.compile"
        )
    for key, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"apply_policy: variables are float32, but {name}.{key} is {parameter.dtype}: call "
                "module.float()"
            )


class _WithPolicy:
    """The class of a module with a policy derives from this, and then from what it was."""

    _dtype_policy: str

    @property
    def dtype_policy(self) -> Policy:
        return Policy(self._dtype_policy)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(args, kwargs, self)
        if self._dtype_policy == "float32":
            args, kwargs = tree_map(_widened, (args, kwargs))
        with region_of(self._dtype_policy, device_type):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> Any:
        make, arguments, *rest = super().__reduce_ex__(protocol)
        if make is not copyreg.__newobj__:
            raise TypeError(f"{type(self).__base__} with a policy cannot be copied or pickled")
        cls, *arguments = arguments
        return _new, (cls.__bases__[1], *arguments), *rest


@functools.cache
def _with_policy(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"{cls.__name__}WithPolicy", (_WithPolicy, cls), {"__module__": cls.__module__})


def _new(cls: type[nn.Module], *arguments: Any) -> nn.Module:
    with_policy = _with_policy(cls)
    return with_policy.__new__(with_policy, *arguments)


def _keep_from_fast_paths(module: nn.Module, args: Any) -> None:
    """torch's Transformer layers compute modules without hooks from their parameters."""


def _device_type(args: Any, kwargs: Any, module: nn.Module) -> str:
    for tensor in (*module.parameters(), *tree_leaves((args, kwargs))):
        if isinstance(tensor, Tensor):
            return tensor.device.type
    return "cpu"


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _LOW else leaf
