"""Layers whose backward pass forms less: fused activations, weight gradients added in place."""

import torch
from torch import Tensor, nn

from amp_ext import ops


class Linear(nn.Linear):
    """``torch.nn.Linear`` with an activation in its product.

    Parameters, their initial values and the state dict are those of ``torch.nn.Linear``. Under
    autocast, torch's or :class:`amp_ext.autocast`, operands are cast as there, and the gradients of
    float32 parameters never pass through float16.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias.
        device: of the parameters.
        dtype: of the parameters.
        activation: "none", "relu", "gelu" or "gelu_tanh"; see :func:`amp_ext.ops.gemm`.
        accumulate_grad: whether the weight's gradient may be added to ``weight.grad`` by the
            product that forms it, where that is provably what autograd would do. A step that
            accumulates gradients over several backward passes then needs no memory but that of
            ``weight.grad``. :func:`amp_ext.ops.linear` says when it is done.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "none",
        accumulate_grad: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = _checked(activation)
        self.accumulate_grad = accumulate_grad

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            accumulate_grad=self.accumulate_grad,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(self)


class MLP(nn.Module):
    """Two linear layers with an activation between them, as one node of the graph.

    Its layers are ``torch.nn.Linear`` modules named ``fc1`` and ``fc2``, but for their parameters
    alone: :func:`amp_ext.ops.mlp` computes, and says what it keeps and fuses. Neither their hooks
    nor the ``forward`` of a module put in their place are called.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers.
        out_features: size of the last dimension of the output; ``in_features`` when None.
        bias: whether the layers add biases.
        device: of the parameters.
        dtype: of the parameters.
        activation: of the hidden layer, as for :class:`Linear`.
        accumulate_grad: as for :class:`Linear`, of both weights.
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
        activation: str = "gelu",
        accumulate_grad: bool = False,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation = _checked(activation)
        self.accumulate_grad = accumulate_grad

    def forward(self, input: Tensor) -> Tensor:
        return ops.mlp(
            input,
            self.fc1.weight,
            self.fc1.bias,
            self.fc2.weight,
            self.fc2.bias,
            activation=self.activation,
            accumulate_grad=self.accumulate_grad,
        )

    def extra_repr(self) -> str:
        return _options(self).removeprefix(", ")


_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh")


def _checked(activation: str) -> str:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    return activation


def _options(module: Linear | MLP) -> str:
    said = f", activation={module.activation!r}"
    return said + (", accumulate_grad=True" if module.accumulate_grad else "")
