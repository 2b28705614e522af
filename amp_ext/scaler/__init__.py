"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

from amp_ext._untraced import call_untraced
from amp_ext.scaler import (
    arriving,
    clip,
    grad_scaler,
    history,
    numbers,
    optimizers,
    report,
    state,
)
from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.report import BadGradient, OverflowReport

__all__ = ["BadGradient", "GradScaler", "OverflowReport"]

for _module in (arriving, clip, grad_scaler, history, numbers, optimizers, report, state):
    call_untraced(_module)
