"""Group parameters without their optimizer, for the passes of the scaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

OrParameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


class Parameters:
    """Group parameters as an optimizer does.

    Args:
        source: a tensor or an iterable of tensors.

    Raises:
        TypeError: another source.
    """

    def __init__(self, source: Tensor | Iterable[Tensor]) -> None:
        params = [source] if isinstance(source, (Tensor, torch.nn.Module)) else list(source)
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(
                    "GradScaler.clip_grad_norm_: expected an optimizer, or parameters as in "
                    f"model.parameters(), got {type(param).__name__}"
                )
        self.param_groups = [{"params": list({id(param): param for param in params}.values())}]


def params_of(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the parameters of all groups."""
    return (param for group in optimizer.param_groups for param in group["params"])
