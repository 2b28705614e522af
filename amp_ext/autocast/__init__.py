"""Mixed-precision regions: ``torch.autocast``'s interface on this package's products."""

from amp_ext.autocast.regions import autocast, cast_weights_together

__all__ = ["autocast", "cast_weights_together"]
