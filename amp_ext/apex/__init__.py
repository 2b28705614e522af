"""A home for programs of NVIDIA Apex's amp: ``from amp_ext.apex import amp``.

Apex has had no amp since May 2025. This one has its functions and arguments, on
:class:`amp_ext.GradScaler`, :class:`amp_ext.autocast` and the master weights of
:mod:`amp_ext.optim`.
"""

import importlib
import sys
from importlib.util import find_spec

from amp_ext.apex import amp
from amp_ext.apex._scaler import from_grad_scaler, to_grad_scaler

__all__ = ["amp", "from_grad_scaler", "install", "to_grad_scaler"]


def install() -> None:
    """Lets ``from apex import amp`` mean :mod:`amp_ext.apex.amp`, in libraries that say so, such as
    timm. To be called before they are imported. Where Apex is installed, its other parts stay."""
    if "apex" not in sys.modules and find_spec("apex") is None:
        sys.modules["apex"] = sys.modules[__name__]
    importlib.import_module("apex").amp = sys.modules["apex.amp"] = amp
