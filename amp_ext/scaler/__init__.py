"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

from amp_ext.ops._when_imported import when_imported
from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.report import BadGradient, OverflowReport

__all__ = ["BadGradient", "GradScaler", "OverflowReport"]

# Dynamo does not trace these modules, as it does not trace torch.amp.grad_scaler.
when_imported("torch._dynamo", lambda dynamo: dynamo.trace_rules.add(__name__))
