"""Mixed-precision regions."""

import torch


class autocast(torch.autocast):
    """``torch.autocast`` under this package's name, so that one import serves a training script.

    Takes the arguments of ``torch.autocast`` (device_type, dtype, enabled, cache_enabled), has the
    same effect, and works as a context manager and as a decorator.
    """
