"""Group parameters without their optimizer, for the passes of the scaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

OrParameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


class Parameters:
    """Group parameters as an optimizer does."""

    def __init__(self, source: Tensor | Iterable[Tensor]) -> None:
        params = [source] if isinstance(source, Tensor) else source
        self.param_groups = [{"params": list({id(param): param for param in params}.values())}]


def params_of(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the parameters of all groups."""
    return (param for group in optimizer.param_groups for param in group["params"])
