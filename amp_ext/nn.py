"""Layers with fused activations, and with weight gradients added in place."""

from types import NoneType

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from amp_ext import ops


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
        accumulate_grad: whether the weight's gradient may be added to ``weight.grad`` by the
            product that computes it, where that is provably what autograd would do. A step that
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
        accumulate_grad: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.accumulate_grad = accumulate_grad

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, accumulate_grad=self.accumulate_grad)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", accumulate_grad=True" if self.accumulate_grad else "")


class LinearActivation(nn.Module):
    """:class:`Linear` and an activation, in one product.

    Parameters, their initial values and the state dict are those of ``torch.nn.Linear``. It is not
    an instance of that, since whatever merges, quantizes or replaces the ``torch.nn.Linear`` layers
    of a model would lose the activation. What initializes them does not find it either.

    Args:
        in_features, out_features, bias, device, dtype: as for :class:`Linear`.
        activation: "none", "relu", "gelu" or "gelu_tanh"; see :func:`amp_ext.ops.gemm`.
        accumulate_grad: as for :class:`Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu",
        accumulate_grad: bool = False,
    ) -> None:
        super().__init__()
        like = nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.weight = like.weight
        self.register_parameter("bias", like.bias)
        self.activation = _checked(activation)
        self.accumulate_grad = accumulate_grad

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            accumulate_grad=self.accumulate_grad,
        )

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {_options(self)}"


class MLP(nn.Module):
    """Two linear layers with an activation between them, as one node of the graph.

    Its layers are ``torch.nn.Linear`` modules named ``fc1`` and ``fc2``. :func:`amp_ext.ops.mlp`
    computes from their parameters, and says what it keeps and fuses, as long as a call of them
    would do nothing else. When one has been replaced or its ``forward`` overridden, when it has
    hooks, parametrizations or a weight of a subclass of ``Tensor``, and while there are hooks of
    all modules (as within ``FlopCounterMode``), both are called. They then do what they do in any
    model: ``accumulate_grad`` has no effect on them, dtypes are not mixed outside of autocast, and
    it takes :class:`amp_ext.autocast` to keep float32 gradients from passing through float16.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: size between the layers.
        out_features: size of the last dimension of the output; ``in_features`` when None.
        bias: whether the layers add biases.
        device: of the parameters.
        dtype: of the parameters.
        activation: of the hidden layer, as for :class:`LinearActivation`.
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
        fc1, fc2 = self.fc1, self.fc2
        if _has_any_global_hook() or not (_is_plain(fc1) and _is_plain(fc2)):
            return fc2(_ACTIVATIONS[self.activation](fc1(input)))
        return ops.mlp(
            input,
            fc1.weight,
            fc1.bias,
            fc2.weight,
            fc2.bias,
            activation=self.activation,
            accumulate_grad=self.accumulate_grad,
        )

    def extra_repr(self) -> str:
        return _options(self)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is torch.nn.functional.linear of its parameters, and no more."""
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


_FORWARD = nn.Linear.forward
_PLAIN = (nn.Parameter, Tensor, NoneType)  # a Tensor as of FSDP1, DataParallel and functional_call

_ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _checked(activation: str) -> str:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    return activation


def _options(module: LinearActivation | MLP) -> str:
    said = f"activation={module.activation!r}"
    return said + (", accumulate_grad=True" if module.accumulate_grad else "")
