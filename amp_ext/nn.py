"""Provide layers with fused activations."""

from collections.abc import Callable
from types import NoneType

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from amp_ext import ops

__all__ = ["MLP", "GatedMLP", "Linear", "LinearActivation"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
_FORWARD = nn.Linear.forward
_PLAIN = (nn.Parameter, Tensor, NoneType)  # a Tensor as of FSDP1, DataParallel and functional_call


class Linear(nn.Linear):
    """Compute ``torch.nn.Linear`` by :func:`amp_ext.ops.linear`.

    Parameters, their initial values and the state dict are as in ``torch.nn.Linear``. Under
    autocast, torch's or :class:`amp_ext.autocast`, operands are cast as there, and the gradients of
    float32 parameters never pass through float16. :class:`LinearActivation` adds an activation.

    Args:
        in_features, out_features, bias, device, dtype: as for ``torch.nn.Linear``.
    """

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


class LinearActivation(nn.Module):
    """Compute :class:`Linear` and an activation in one product.

    The class is no subclass of ``torch.nn.Linear``: a tool that merges, quantizes or replaces such
    layers would lose the activation. Code that initializes such layers does not find it either.

    Args:
        in_features, out_features, bias, device, dtype: as for ``torch.nn.Linear``.
        activation: "relu", "gelu", "gelu_tanh" or "silu", see :func:`amp_ext.ops.gemm`; None or
            "none" for none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "gelu",
    ) -> None:
        super().__init__()
        like = nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.weight = like.weight
        self.register_parameter("bias", like.bias)
        self.activation = _checked_activation(activation)

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, activation={self.activation!r}"


class _Block(nn.Module):
    def __init__(self, activation: str | None, dropout: float) -> None:
        super().__init__()
        self.activation = _checked_activation(activation)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a probability between 0 and 1, got {dropout!r}.")
        self.dropout = dropout

    def _is_fused(self) -> bool:
        """Return whether the op computes the same as calls of the layers."""
        is_dropping = self.training and self.dropout > 0
        return not (is_dropping or _has_any_global_hook()) and all(map(_is_plain, self.children()))

    def _activated(self, hidden: Tensor, factor: Tensor | None = None) -> Tensor:
        """Apply the activation, a gate's factor and dropout, as calls of the layers need it."""
        hidden = _ACTIVATIONS[self.activation](hidden)
        hidden = hidden if factor is None else hidden * factor
        return F.dropout(hidden, self.dropout, self.training) if self.dropout > 0 else hidden

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout > 0 else ""
        return f"activation={self.activation!r}{dropout}"


class MLP(_Block):
    """Compute two linear layers with an activation between them, fused into the first product.

    Its layers are ``torch.nn.Linear`` modules named ``fc1`` and ``fc2``. :func:`amp_ext.ops.linear`
    computes from their parameters.

    The module calls both layers instead in these cases: dropout is active; a layer is replaced or
    overridden; a layer has hooks, parametrizations or a weight of a ``Tensor`` subclass; there are
    global module hooks, as within ``FlopCounterMode``. In these cases only
    :class:`amp_ext.autocast` keeps float32 gradients out of float16.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers.
        out_features: size of the last dimension of the output; ``in_features`` when None.
        bias: whether the layers add biases.
        device, dtype: the device and dtype of the parameters.
        activation: the activation of the hidden layer, as for :class:`LinearActivation`.
        dropout: the probability that an element behind the activation is zeroed while training, by
            torch.nn.functional.dropout.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(activation, dropout)
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if not self._is_fused():
            return fc2(self._activated(fc1(input)))
        hidden = ops.linear(input, fc1.weight, fc1.bias, activation=self.activation)
        return ops.linear(hidden, fc2.weight, fc2.bias)


class GatedMLP(_Block):
    """Compute ``down_proj(act(gate_proj(input)) * up_proj(input))``, as one autograd node.

    Its layers are ``torch.nn.Linear`` modules with the names of Llama's, and by default without
    biases, as there: Llama's checkpoints load. :func:`amp_ext.ops.gated_mlp` computes from their
    parameters. The module calls all three layers in the same cases as :class:`MLP`.

    Args:
        in_features, hidden_features, out_features, bias, device, dtype: as for :class:`MLP`.
        activation: the activation of ``gate_proj``; "silu" makes it SwiGLU, "gelu" GEGLU, None a
            bilinear layer.
        dropout: as for :class:`MLP`, of the input of ``down_proj``.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "silu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(activation, dropout)
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not self._is_fused():
            return down(self._activated(gate(input), up(input)))
        return ops.gated_mlp(
            input,
            gate.weight,
            gate.bias,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            activation=self.activation,
        )


# ---- options -----------------------------------------------------------------------------------


def _checked_activation(activation: str | None) -> str:
    name = "none" if activation is None else activation
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation: expected None or one of {', '.join(_ACTIVATIONS)}, got {activation!r}."
        )
    return name


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a call of the layer is torch.nn.functional.linear of its parameters."""
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
