"""Provide the precision plugins of Lightning and Fabric.

Write ``Trainer(plugins=MixedPrecision())``, or ``Fabric(plugins=FabricMixedPrecision())`` with the
``Fabric`` of this module.
"""

from amp_ext.integrations._lightning import extended

__all__ = ["Fabric", "FabricMixedPrecision", "MixedPrecision"]

Fabric, FabricMixedPrecision, MixedPrecision = extended(
    __name__, "lightning.fabric", "lightning.pytorch"
)
