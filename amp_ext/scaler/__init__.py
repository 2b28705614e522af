"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.report import BadGradient, OverflowReport

__all__ = ["BadGradient", "GradScaler", "OverflowReport"]
