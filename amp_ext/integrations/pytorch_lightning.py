"""Provide the plugins of :mod:`amp_ext.integrations.lightning` for other package names.

The plugins serve programs that import ``pytorch_lightning`` and ``lightning_fabric``.
"""

import lightning_fabric
from lightning_fabric.plugins import MixedPrecision as _FabricMixedPrecision
from pytorch_lightning.plugins import MixedPrecision as _MixedPrecision

from amp_ext.integrations._lightning import ClipsByScaler, InFabric, InTrainer, WithScaler

__all__ = ["Fabric", "FabricMixedPrecision", "MixedPrecision"]


class MixedPrecision(InTrainer, _MixedPrecision):  # checkpoints know torch's scaler by this name
    __doc__ = WithScaler.__doc__


class FabricMixedPrecision(InFabric, _FabricMixedPrecision):
    __doc__ = WithScaler.__doc__


class Fabric(ClipsByScaler, lightning_fabric.Fabric):
    __doc__ = ClipsByScaler.__doc__
