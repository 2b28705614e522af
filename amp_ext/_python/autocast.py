"""What amp_ext.autocast finds here: its regions are torch's own."""

from __future__ import annotations

import warnings

from amp_ext._library import GET_EXTENSION

REGION_MARK = "ipu"


def enter_region() -> None:
    """Nothing is replaced."""


def exit_region() -> None:
    """Nothing was."""


def install() -> None:
    warnings.warn(
        "amp_ext.install: torch.autocast regions stay torch's own: amp_ext is installed without "
        f"its extension module; {GET_EXTENSION}",
        RuntimeWarning,
        stacklevel=3,
    )


def uninstall() -> None:
    """Nothing was installed."""


def is_installed() -> bool:
    return False


def cast_weights_together(on: bool) -> None:
    """torch casts each weight when it is first needed in a region."""
