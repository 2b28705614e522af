"""The ops that a region is told to run in float16 (or its dtype) or in float32."""

import functools
from collections.abc import Iterable
from difflib import get_close_matches

from torch import nn

from amp_ext._library import _C

Listed = str | type[nn.Module]
# The one op that the forward of a module is.
MODULES: dict[type[nn.Module], str] = {
    nn.Bilinear: "bilinear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.CrossEntropyLoss: "cross_entropy_loss",
    nn.ELU: "elu",
    nn.GELU: "gelu",
    nn.GroupNorm: "group_norm",
    nn.LayerNorm: "layer_norm",
    nn.Linear: "linear",
    nn.LogSoftmax: "log_softmax",
    nn.MSELoss: "mse_loss",
    nn.RMSNorm: "rms_norm",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Softmax: "softmax",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
}
_CANCELS = "binary_cross_entropy"  # torch's autocast refuses it: it overflows in 16 bits


class OpLists:
    """The ops that a region lists, by their names with a namespace.

    Args:
        low, fp32: names of torch's ops, such as "softmax", or with a namespace, "aten::bmm"; or
            MODULES, by class or name: "LayerNorm".

    Raises:
        TypeError: neither names nor classes, or one string in the place of several.
        ValueError: a name that is no op's, or one that is in both lists, or an op of which autocast
            cannot choose the type; a module of several ops.
    """

    def __init__(self, low: Iterable[Listed] | None, fp32: Iterable[Listed] | None) -> None:
        self.low = _full_names("custom_fp16_ops", low)
        self.fp32 = _full_names("custom_fp32_ops", fp32)
        both = [name for name in self.low if name in self.fp32]
        if both:
            raise ValueError(
                f"amp_ext.autocast: {both[0]} is both in custom_fp16_ops and in custom_fp32_ops"
            )
        if f"aten::{_CANCELS}" in self.low:
            raise ValueError(
                f"amp_ext.autocast: custom_fp16_ops: {_CANCELS} overflows in 16 bits, so that "
                "torch's autocast refuses it: use binary_cross_entropy_with_logits, or put it into "
                "custom_fp32_ops"
            )

    def enter(self) -> "_C.OpListRegion":
        return _C.enter_op_lists(self.low, self.fp32)


def _full_names(argument: str, names: Iterable[Listed] | None) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise TypeError(
            f"amp_ext.autocast: {argument} must be several names, as {{'softmax'}}, got {names!r}"
        )
    return [_full_name(argument, name) for name in names or ()]


def _full_name(argument: str, name: str | type[nn.Module]) -> str:
    if isinstance(name, type) and issubclass(name, nn.Module):
        return _of_a_module(argument, name)
    if not isinstance(name, str):
        raise TypeError(
            f"amp_ext.autocast: {argument} takes names of ops, as 'softmax', or modules of "
            f"torch.nn, got {name!r}"
        )
    module = getattr(nn, name, None)
    if isinstance(module, type) and issubclass(module, nn.Module):
        return _of_a_module(argument, module)
    return _of_an_op(argument, name)


def _of_a_module(argument: str, module: type[nn.Module]) -> str:
    if module in MODULES:
        return f"aten::{MODULES[module]}"
    name = module.__name__
    raise ValueError(
        f"amp_ext.autocast: {argument}: {name} is none of the modules of torch.nn that stand for "
        f"one op: give it a policy, amp_ext.keras.apply_policy(model, policy, only={name})"
    )


@functools.cache  # it looks through all ops
def _of_an_op(argument: str, name: str) -> str:
    full = name if "::" in name else f"aten::{name}"
    why_not = _C.why_not_listable(full)
    if not why_not:
        return full
    text = f"amp_ext.autocast: {argument}: {name!r} {why_not}"
    if why_not == "is no op":
        close = get_close_matches(name.removeprefix("aten::"), _C.listable_ops(), 3, 0.5)
        text += f" of torch's; the closest names are {', '.join(close)}" if close else " of torch's"
    raise ValueError(text)
