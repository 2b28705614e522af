"""Whether the layers inside a layer have to be called, or can be computed from their parameters."""

from types import NoneType

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

_FORWARD = nn.Linear.forward
_PLAIN = (nn.Parameter, Tensor, NoneType)  # a Tensor as of FSDP1, DataParallel and functional_call


def are_plain(*layers: nn.Module) -> bool:
    """Whether calls of the layers are torch.nn.functional.linear of their parameters, no more."""
    return not _has_any_global_hook() and all(_is_plain(layer) for layer in layers)


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and (is_compiling() or nn.Linear.forward is _FORWARD)  # Dynamo cannot compare functions
        and type(layer.weight) in _PLAIN
        and type(layer.bias) in _PLAIN
        and "forward" not in layer.__dict__
        and not (
            layer._forward_pre_hooks
            or layer._forward_hooks
            or layer._backward_pre_hooks
            or layer._backward_hooks
        )
    )
