"""A hidden layer that an activated one gates, as in SwiGLU, and a linear layer behind it."""

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


class GatedMLP(nn.Module):
    """``down_proj(act(gate_proj(input)) * up_proj(input))``, as one node of the graph.

    Its layers are ``torch.nn.Linear`` modules with the names that Llama and its kin have for them,
    and by default without biases, as there: their checkpoints load.
    :func:`amp_ext.ops.gated_mlp` computes from their parameters, and says what it keeps, as long as
    a call of them would do nothing else; else all three are called, as those of
    :class:`amp_ext.nn.MLP`.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers.
        out_features: size of the last dimension of the output; ``in_features`` when None.
        bias: whether the layers add biases.
        device: of the parameters.
        dtype: of the parameters.
        activation: of ``gate_proj``, as for :class:`LinearActivation`; "silu" makes it SwiGLU,
            "gelu" GEGLU, None a bilinear layer.
        dropout: as for :class:`amp_ext.nn.MLP`, of the input of ``down_proj``.
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
        super().__init__()
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation = checked_activation(activation)
        self.dropout = checked_dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not are_plain(gate, up, down):
            hidden = ACTIVATIONS[self.activation](gate(input)) * up(input)
            return down(F.dropout(hidden, self.dropout) if drops(self) else hidden)
        activation = self.activation
        if drops(self):
            hidden = ops.linear(input, gate.weight, gate.bias, activation=activation) * ops.linear(
                input, up.weight, up.bias
            )
            hidden = F.dropout(hidden, self.dropout)
            return ops.linear(hidden, down.weight, down.bias)
        return ops.gated_mlp(
            input,
            gate.weight,
            gate.bias,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            activation=activation,
        )

    def extra_repr(self) -> str:
        return in_words(self)
