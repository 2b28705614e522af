"""Two linear layers with an activation between them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_ext import ops
from amp_ext.nn.called import are_plain
from amp_ext.nn.options import (
    ACTIVATIONS,
    checked_activation,
    checked_dropout,
    drops,
    in_words,
)


class MLP(nn.Module):
    """Two linear layers with an activation between them, as one node of the graph.

    Its layers are ``torch.nn.Linear`` modules named ``fc1`` and ``fc2``. :func:`amp_ext.ops.mlp`
    computes from their parameters, and says what it keeps and fuses, as long as a call of them
    would do nothing else. When one has been replaced or its ``forward`` overridden, when it has
    hooks, parametrizations or a weight of a subclass of ``Tensor``, and while there are hooks of
    all modules (as within ``FlopCounterMode``), both are called. They then do what they do in any
    model: dtypes are not mixed outside of autocast, and it takes :class:`amp_ext.autocast` to keep
    float32 gradients from passing through float16.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers.
        out_features: size of the last dimension of the output; ``in_features`` when None.
        bias: whether the layers add biases.
        device: of the parameters.
        dtype: of the parameters.
        activation: of the hidden layer, as for :class:`LinearActivation`.
        dropout: with which probability, while training, torch.nn.functional.dropout zeroes an
            element behind the activation. Each layer is then a node of its own, and more is kept.
    """

    dropout: float = 0.0  # of what was pickled without it

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
        super().__init__()
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation = checked_activation(activation)
        self.dropout = checked_dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if not are_plain(fc1, fc2):
            hidden = ACTIVATIONS[self.activation](fc1(input))
            return fc2(F.dropout(hidden, self.dropout) if drops(self) else hidden)
        activation = self.activation
        if drops(self):
            hidden = ops.linear(input, fc1.weight, fc1.bias, activation=activation)
            hidden = F.dropout(hidden, self.dropout)
            return ops.linear(hidden, fc2.weight, fc2.bias)
        return ops.mlp(
            input,
            fc1.weight,
            fc1.bias,
            fc2.weight,
            fc2.bias,
            activation=activation,
        )

    def extra_repr(self) -> str:
        return in_words(self)
