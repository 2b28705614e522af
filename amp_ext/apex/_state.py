"""What the functions of amp know of each other: that of the last ``amp.initialize``."""

import torch

from amp_ext.apex._options import Options
from amp_ext.apex._scaler import LossScaler


class AmpState:
    """Attributes:
    opt_properties: None before the first ``amp.initialize``.
    device_types: of the models.
    casts: False within ``disable_casts()``.
    forward_ran: whether a model's forward pass has run since.
    """

    def __init__(self) -> None:
        self.opt_properties: Options | None = None
        self.loss_scalers: list[LossScaler] = []
        self.device_types: tuple[str, ...] = ()
        self.verbosity = 1
        self.casts = True
        self.forward_ran = False


amp_state = AmpState()


def say(message: str, once: bool = False) -> None:
    """Print, unless ``verbosity`` is 0; with ``once`` in one process alone."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    if amp_state.verbosity > 0 and not (once and several and distributed.get_rank() != 0):
        print(f"amp_ext.apex.amp: {message}")
