"""Serve programs that name ``torch.cpu.amp``."""

from amp_ext.cpu import amp

__all__ = ["amp"]
