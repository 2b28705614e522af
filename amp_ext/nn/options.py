"""The options of layers: activations by their names, and dropout."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def checked_activation(activation: str | None) -> str:
    name = "none" if activation is None else activation
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return name


def checked_dropout(dropout: float) -> float:
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability between 0 and 1, got {dropout!r}")
    return dropout


def drops(layer: nn.Module) -> bool:
    """Whether a layer's dropout changes anything now."""
    return layer.training and layer.dropout > 0


def in_words(layer: nn.Module) -> str:
    said = [f"activation={layer.activation!r}"]
    if getattr(layer, "dropout", 0) > 0:
        said.append(f"dropout={layer.dropout}")
    return ", ".join(said)
