"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

from amp_ext._untraced import call_untraced
from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.report import BadGradient, OverflowReport

__all__ = ["BadGradient", "GradScaler", "OverflowReport"]

call_untraced(__name__)
