"""Cast tensors around the forward pass of modules.

A module with casts is an instance of a subclass of its class. Its copies, its pickles, replicas of
DataParallel, compiled modules and wrappers that call ``module.forward`` have the casts too.
"""

import functools
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_ext.autocast import autocast

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
# Their classes have one instance, or change.
_GENERATED = (torch.jit.ScriptModule, torch.fx.GraphModule, nn.modules.lazy.LazyModuleMixin)


class Cast(NamedTuple):
    """A cast of the tensors that have one of the dtypes."""

    dtypes: tuple[torch.dtype, ...]
    to: torch.dtype

    def __call__(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(self.to) if x.dtype in self.dtypes else x, tree)


class Casts(NamedTuple):
    """The casts of a module.

    Attributes:
        region: the dtype of the autocast region of forward; float32 disables autocast, None leaves
            the caller's region.
        inputs: the cast of arguments.
        outputs: the cast of results.
    """

    region: torch.dtype | None = None
    inputs: Cast | None = None
    outputs: Cast | None = None


def check_module(function: str, module: nn.Module) -> None:
    """Raise TypeError or ValueError for a module that cannot have casts."""
    name = type(module).__name__
    if "forward" in vars(module) or isinstance(module, _GENERATED):
        raise TypeError(
            f"{function}: module: expected a class and a forward that stay, got a {name}: "
            "torch.compile, TorchScript, torch.fx and some wrappers replace them. Call "
            f"{function} before them, and after the first forward of lazy layers."
        )
    if is_parametrized(module) and not hasattr(type(module), "_has_casts"):
        raise TypeError(
            f"{function}: module: expected no parametrizations, got a {name}. Call {function} "
            "before register_parametrization, which puts a class on the module."
        )
    for key, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.dtype in HALVES:
            raise ValueError(
                f"{function}: {name}.{key}: expected torch.float32, got {tensor.dtype}. Call "
                "module.float()."
            )


def give_casts(module: nn.Module, casts: Casts) -> None:
    """Set the casts of a module in place."""
    module._casts = casts
    # Others may have put a class on the one with casts. It stays.
    if not hasattr(type(module), "_has_casts"):
        module.__class__ = _casting(type(module))


def device_type_of(module: nn.Module, arguments: Any = ()) -> str:
    """Return the device type of the parameters, else of the arguments, else "cpu"."""
    param = next(module.parameters(), None)
    tensors = tree_leaves(arguments) if param is None else [param]
    return next((leaf.device.type for leaf in tensors if isinstance(leaf, Tensor)), "cpu")


@functools.cache
def _casting(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with casts in its forward."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        casts = self._casts
        if casts.inputs is not None:
            args, kwargs = casts.inputs((args, kwargs))
        if casts.region is None:
            outputs = cls.forward(self, *args, **kwargs)
        else:
            half = casts.region if casts.region in HALVES else None
            with autocast(device_type_of(self, (args, kwargs)), half, half is not None):
                outputs = cls.forward(self, *args, **kwargs)
        return outputs if casts.outputs is None else casts.outputs(outputs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        make, args, *rest = super(casting, self).__reduce_ex__(protocol)
        if args[:1] == (casting,):  # pickle could not find the class by its name
            return _new, (cls, *args[1:]), *rest
        return make, args, *rest

    names = {"forward": forward, "__reduce_ex__": __reduce_ex__, "_has_casts": True}
    names |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    casting = type(cls)(cls.__name__, (cls,), names)
    return casting


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(_casting(cls), *args)
