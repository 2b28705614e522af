"""Check the options of layers, and whether their parameters alone define them."""

from collections.abc import Callable
from types import NoneType

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
_FORWARD = nn.Linear.forward
_PLAIN = (nn.Parameter, Tensor, NoneType)  # a Tensor as of FSDP1, DataParallel and functional_call


def checked_activation(activation: str | None) -> str:
    name = "none" if activation is None else activation
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation: expected None or one of {', '.join(ACTIVATIONS)}, got {activation!r}."
        )
    return name


def checked_dropout(dropout: float) -> float:
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout: expected a probability between 0 and 1, got {dropout!r}.")
    return dropout


def are_plain(*layers: nn.Module) -> bool:
    """Return whether calls of the layers are torch.nn.functional.linear of their parameters."""
    return not _has_any_global_hook() and all(map(_is_plain, layers))


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
