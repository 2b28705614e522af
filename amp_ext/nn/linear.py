"""One linear layer, without and with an activation."""

import torch
from torch import Tensor, nn

from amp_ext import ops
from amp_ext.nn.options import checked_activation, in_words


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`amp_ext.ops.linear`.

    For one with an activation there is :class:`LinearActivation`.

    Parameters, their initial values and the state dict are those of ``torch.nn.Linear``. Under
    autocast, torch's or :class:`amp_ext.autocast`, operands are cast as there, and the gradients of
    float32 parameters never pass through float16.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias.
        device: of the parameters.
        dtype: of the parameters.
    """

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


class LinearActivation(nn.Module):
    """:class:`Linear` and an activation, in one product.

    Parameters, their initial values and the state dict are those of ``torch.nn.Linear``. It is not
    an instance of that, since whatever merges, quantizes or replaces the ``torch.nn.Linear`` layers
    of a model would lose the activation. What initializes them does not find it either.

    Args:
        in_features, out_features, bias, device, dtype: as for :class:`Linear`.
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
        self.activation = checked_activation(activation)

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {in_words(self)}"
