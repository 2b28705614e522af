"""Run programs of Apex's amp: ``from amp_ext.compat.apex import amp``.

Apex has had no amp since May 2025. This module has its functions and arguments, on
:class:`amp_ext.GradScaler`, :class:`amp_ext.autocast` and the master weights of
:mod:`amp_ext.optim`.
"""

import importlib
import sys
from importlib.util import find_spec

from amp_ext.compat.apex import amp
from amp_ext.compat.apex.scaler import from_grad_scaler, to_grad_scaler

__all__ = ["amp", "from_grad_scaler", "install", "to_grad_scaler"]


def install() -> None:
    """Make ``from apex import amp`` import :mod:`amp_ext.compat.apex.amp`.

    Call it before the import of a library that imports ``apex``, such as timm. Other parts of an
    installed Apex stay.
    """
    if "apex" not in sys.modules and find_spec("apex") is None:
        sys.modules["apex"] = sys.modules[__name__]
    importlib.import_module("apex").amp = sys.modules["apex.amp"] = amp
