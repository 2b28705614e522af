"""Put the scaler into the ``Trainer`` of transformers.

A trainer of the user's own is ``class MyTrainer(ScalerMixin, SFTTrainer)``.
"""

from typing import Any, ClassVar

import transformers

from amp_ext.integrations.accelerate import with_scaler

__all__ = ["ScalerMixin", "Trainer"]


class ScalerMixin:
    """Train with an accelerator of :func:`amp_ext.integrations.accelerate.with_scaler`.

    Attributes:
        scaler_options: options of :class:`amp_ext.GradScaler`, set by a subclass.
    """

    scaler_options: ClassVar[dict[str, Any]] = {}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        with_scaler(self.accelerator, **self.scaler_options)


class Trainer(ScalerMixin, transformers.Trainer):
    __doc__ = ScalerMixin.__doc__
