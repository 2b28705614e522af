"""Provide the precision plugins of Lightning and Fabric.

Write ``Trainer(plugins=MixedPrecision())``, or ``Fabric(plugins=FabricMixedPrecision())`` with the
``Fabric`` of this module.
"""

import lightning
from lightning.fabric.plugins import MixedPrecision as _FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision as _MixedPrecision

from amp_ext.integrations._lightning import ClipsByScaler, InFabric, InTrainer, WithScaler

__all__ = ["Fabric", "FabricMixedPrecision", "MixedPrecision"]


class MixedPrecision(InTrainer, _MixedPrecision):  # checkpoints know torch's scaler by this name
    __doc__ = WithScaler.__doc__


class FabricMixedPrecision(InFabric, _FabricMixedPrecision):
    __doc__ = WithScaler.__doc__


class Fabric(ClipsByScaler, lightning.Fabric):
    __doc__ = ClipsByScaler.__doc__
