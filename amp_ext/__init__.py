"""A backend for torch.amp: the names of ``torch.amp`` on hand-written kernels.

Write ``from amp_ext import GradScaler, autocast`` for ``from torch.amp import ...``, and
``from amp_ext.cuda.amp import ...`` for ``from torch.cuda.amp import ...``. Importing the package
changes nothing in torch.
"""

import sys

from torch.amp import custom_bwd, custom_fwd, is_autocast_available

try:
    from amp_ext import cpu, cuda, ops, optim
    from amp_ext.autocast import autocast
    from amp_ext.autocast.installation import install, is_installed, uninstall
    from amp_ext.backend import get_backend, set_backend
    from amp_ext.scaler import GradScaler
    from amp_ext.tune import tune
except ImportError:
    # `python -m amp_ext` reports the error itself.
    if sys.argv[:1] != ["-m"] or "amp_ext" not in sys.orig_argv:
        raise

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "__version__",
    "autocast",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "get_backend",
    "install",
    "is_autocast_available",
    "is_installed",
    "ops",
    "optim",
    "set_backend",
    "tune",
    "uninstall",
]
