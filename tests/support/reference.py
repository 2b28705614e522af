"""The references of all ops under the names of amp_ext.ops, and their examples."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from amp_ext import ops
from amp_ext.ops.lists import FLT_MIN, clip_coefficient

__all__ = ["FLT_MIN", "arguments", "clip_coefficient", *ops.__all__]

globals().update({name: getattr(ops, name).reference for name in ops.__all__})


def arguments(op: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return new example arguments of an op, with every tensor."""
    example = next(getattr(ops, op).cases())
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example.arguments)
