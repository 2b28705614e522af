"""Provide a linear layer for use under either autocast."""

from torch import Tensor, nn

from amp_ext import ops

__all__ = ["Linear"]


class Linear(nn.Linear):
    """Compute ``torch.nn.Linear`` by :func:`amp_ext.ops.linear`.

    Parameters, their initial values and the state dict are as in ``torch.nn.Linear``. Under
    autocast, torch's or :class:`amp_ext.autocast`, operands are cast as there, and the gradients of
    float32 parameters never pass through float16.

    Args:
        in_features, out_features, bias, device, dtype: as for ``torch.nn.Linear``.
    """

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)
