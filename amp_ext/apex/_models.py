"""What ``amp.initialize`` makes of models: the dtype of parameters, and casts around forward.

A model becomes an instance of a subclass of its class, whose ``forward`` casts. So copies, pickles,
replicas of DataParallel, compiled models and wrappers that call ``model.forward`` keep it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from amp_ext.apex._options import HALVES, Options
from amp_ext.apex._state import amp_state
from amp_ext.autocast import autocast

_GENERATED = (torch.jit.ScriptModule, torch.fx.GraphModule)  # of classes of their own


class Casts(NamedTuple):
    """Attributes:
    region: whether forward runs under autocast to float16.
    inputs: the dtype of floating-point arguments; None for no cast.
    outputs: the dtype of floating-point results; None for float32 of what a region has left in 16
        bits.
    """

    region: bool
    inputs: torch.dtype | None
    outputs: torch.dtype | None


def check_models(models: list[nn.Module]) -> None:
    for model in models:
        name = type(model).__name__
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise RuntimeError(f"amp.initialize: got a {name}: wrap the model that it returns")
        if "forward" in vars(model) or isinstance(model, _GENERATED):
            raise RuntimeError(
                f"amp.initialize: the forward of this {name} is not that of its class, as "
                "torch.compile, TorchScript, torch.fx and some wrappers leave it: call "
                "amp.initialize before them"
            )
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for key, tensor in tensors:
            if tensor.dtype in HALVES:
                raise RuntimeError(
                    f"amp.initialize: {key} of {name} is {tensor.dtype}, expected torch.float32: "
                    "do not call .half() or .bfloat16(); opt_level='O2' and 'O3' do so"
                )


def prepare(model: nn.Module, options: Options, outputs: torch.dtype | None) -> None:
    """Cast the model, and let its forward cast. It keeps its parameters, as objects."""
    dtype = options.cast_model_type
    if dtype is not None:
        outputs = outputs or torch.float32
        for module in model.modules():
            if not (options.keep_batchnorm_fp32 and _is_affine_batchnorm(module)):
                module._apply(functools.partial(_cast_float, dtype), recurse=False)
            if dtype in HALVES:
                module.register_state_dict_post_hook(_save_float32)
    model._amp_casts = Casts(options.patch_torch_functions, dtype, outputs)
    model.__class__ = _casting(getattr(type(model), "_amp_class", type(model)))


def device_type_of(model: nn.Module) -> str:
    param = next(model.parameters(), None)
    if param is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return param.device.type


def _is_affine_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def _cast_float(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _save_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for key, value in state_dict.items():
        if isinstance(value, Tensor) and value.dtype in HALVES:
            state_dict[key] = value.float()


# ---- forward -------------------------------------------------------------------------------------


@functools.cache
def _casting(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        casts = self._amp_casts
        if casts.inputs is not None:
            args, kwargs = _floats_to(casts.inputs, (args, kwargs))
        if casts.region and amp_state.casts:
            amp_state.forward_ran = True
            with autocast(device_type_of(self), torch.float16):
                outputs = cls.forward(self, *args, **kwargs)
            if casts.outputs is None:
                return tree_map(_from_half, outputs)
        else:
            outputs = cls.forward(self, *args, **kwargs)
        return outputs if casts.outputs is None else _floats_to(casts.outputs, outputs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        make, args, *rest = super(casting, self).__reduce_ex__(protocol)
        if args[:1] == (casting,):  # pickle could not find it
            return _new, (cls, *args[1:]), *rest
        return make, args, *rest

    names = {"forward": forward, "__reduce_ex__": __reduce_ex__, "_amp_class": cls}
    names |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    casting = type(cls)(cls.__name__, (cls,), names)
    return casting


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(_casting(cls), *args)


def _floats_to(dtype: torch.dtype, tree: Any) -> Any:
    """Cast the floating-point tensors in a tree, and what else has a method ``to``."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _cast_float(dtype, leaf)
        return leaf.to(dtype) if _has_to(leaf) else leaf

    return tree_map(cast, tree)


def _has_to(leaf: Any) -> bool:
    to: Callable[..., Any] | None = getattr(leaf, "to", None)
    return callable(to) and not isinstance(leaf, type)


def _from_half(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf
