"""A faster backend for torch.amp: the names of ``torch.amp``, served by hand-written kernels.

A script that says ``from torch.amp import GradScaler, autocast`` says ``from amp_ext import ...``
instead. Importing the package changes nothing in torch.
"""

import sys

from torch.amp import custom_bwd, custom_fwd, is_autocast_available

try:
    from amp_ext import ops
    from amp_ext.autocast import autocast, install, is_installed, uninstall
    from amp_ext.grad_scaler import GradScaler
except ImportError:
    if sys.argv[:1] != ["-m"]:  # `python -m amp_ext` is on its way, and reports it
        raise

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "__version__",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "install",
    "is_autocast_available",
    "is_installed",
    "ops",
    "uninstall",
]
