"""Serve programs that name ``torch.cuda.amp``."""

from amp_ext.cuda import amp

__all__ = ["amp"]
