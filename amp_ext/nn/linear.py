"""One linear layer, without and with an activation."""

import torch
from torch import Tensor, nn

from amp_ext import ops
from amp_ext.nn.options import checked_activation


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
        self.activation = checked_activation(activation)

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, activation={self.activation!r}"
