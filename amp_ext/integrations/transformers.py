"""transformers: ``Trainer`` of this module, or of one's own trainer ``class MyTrainer(ScalerMixin,
SFTTrainer)``."""

from typing import Any, ClassVar

import transformers

from amp_ext.integrations.accelerate import with_scaler

__all__ = ["ScalerMixin", "Trainer"]


class ScalerMixin:
    """A trainer whose accelerator is one of :func:`amp_ext.integrations.accelerate.with_scaler`.

    Attributes:
        scaler_options: of :class:`amp_ext.GradScaler`; for a subclass to set.
    """

    scaler_options: ClassVar[dict[str, Any]] = {}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        with_scaler(self.accelerator, **self.scaler_options)


class Trainer(ScalerMixin, transformers.Trainer):
    __doc__ = ScalerMixin.__doc__
