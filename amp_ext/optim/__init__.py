"""Optimizers of ``torch.optim`` that update all parameters of a group in one launch.

They are subclasses of torch's, with the same arguments, groups, state and checkpoints.
"""

from amp_ext._untraced import call_untraced
from amp_ext.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]

call_untraced(__name__)
