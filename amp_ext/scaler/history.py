"""What became of the last steps, recorded on the device by the launch that moves the scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RECORDS = 64


class StepRecord(NamedTuple):
    """A step as :meth:`amp_ext.GradScaler.history` tells of it.

    Attributes:
        scale: what the loss was multiplied by.
        overflow: whether a gradient, or a norm, was not finite.
        norm: of the unscaled gradients that ``clip_grad_norm_`` was called for, the largest where
            it was called for several optimizers; NaN where it was not called.
    """

    scale: float
    overflow: bool
    norm: float


def new_history(records: int, device: torch.device | str) -> Tensor:
    """As ``update_scale_`` takes it; a record whose found_inf is negative has not been written."""
    history = torch.full((1 + records, 3), -1.0, device=device)
    history[0, 0] = 0
    return history


def read_history(history: Tensor) -> list[StepRecord]:
    """The records, the newest last. Synchronises with the device."""
    (last, *_), *rows = history.tolist()
    ordered = rows[int(last) :] + rows[: int(last)]
    return [StepRecord(scale, flag != 0, norm) for scale, flag, norm in ordered if flag >= 0]
