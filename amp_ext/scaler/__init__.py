"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

from amp_ext._compile import leave_to_python
from amp_ext.scaler import grad_scaler, optimizers, report, state
from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.report import BadGradient, OverflowReport

__all__ = ["BadGradient", "GradScaler", "OverflowReport"]

leave_to_python(grad_scaler, optimizers, report, state)
