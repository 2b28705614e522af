"""Optimizers of ``torch.optim`` that update all parameters of a group in one launch.

The classes are subclasses of torch's, with the same arguments, groups, state and checkpoints.
"""

from typing import Any

from amp_ext.ops._when_imported import when_imported
from amp_ext.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]


def _leave_untraced(dynamo: Any) -> None:
    """Keep Dynamo from tracing optimizers and scalers, as it does not trace torch's."""
    for name in ("amp_ext.optim", "amp_ext.scaler"):
        dynamo.trace_rules.add(name)


when_imported("torch._dynamo", _leave_untraced)
