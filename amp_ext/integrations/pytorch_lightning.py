"""Provide the plugins of :mod:`amp_ext.integrations.lightning` for other package names.

The plugins serve programs that import ``pytorch_lightning`` and ``lightning_fabric``.
"""

from amp_ext.integrations._lightning import extended

__all__ = ["Fabric", "FabricMixedPrecision", "MixedPrecision"]

Fabric, FabricMixedPrecision, MixedPrecision = extended(
    __name__, "lightning_fabric", "pytorch_lightning"
)
