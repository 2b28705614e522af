"""Ways to unscale and clip, as functions of a scaler, an optimizer and max_norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from twins import params

clip_as_torch = torch.nn.utils.clip_grad_norm_
Clip = Callable[[Any, Optimizer, float], Tensor]


def at_once(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    return scaler.clip_grad_norm_(optimizer, max_norm)


def after_unscale(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    scaler.unscale_(optimizer)
    return scaler.clip_grad_norm_(optimizer, max_norm)


def torchs_recipe(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    scaler.unscale_(optimizer)
    return clip_as_torch(params(optimizer), max_norm)


def by_parameters(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    return scaler.clip_grad_norm_(iter(params(optimizer)), max_norm)


every_way = pytest.mark.parametrize("clip", [at_once, after_unscale])
with_parameters = pytest.mark.parametrize("clip", [at_once, after_unscale, by_parameters])


def found_inf(scaler: Any, optimizer: Optimizer) -> float:
    [flag] = scaler._found_inf_per_device(optimizer).values()
    return flag.item()
