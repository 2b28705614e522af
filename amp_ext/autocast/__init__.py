"""Mixed-precision regions: ``torch.autocast``'s interface on this package's products."""

from amp_ext.autocast.regions import autocast

__all__ = ["autocast"]
