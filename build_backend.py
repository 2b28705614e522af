"""The PEP 517 build backend: setuptools, building against the torch that is installed.

Without a C++ compiler the package is made without its extension module, and needs no torch.

pip builds in an environment of its own that hides the installed packages. A torch downloaded
into it could differ from the one that the extension will meet, so the hooks here look up where
the interpreter finds its packages outside of that environment.
"""

import importlib.machinery
import json
import os
import subprocess
import sys

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401 (hooks that need no torch)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.errors import PlatformError

from setup import why_no_extension


def _installed_path() -> list[str]:
    """The sys.path that this interpreter has without pip's changes to the environment."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")
    }
    script = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", script], env=env))


def _requirements(requires: list[str]) -> list[str]:
    if why_no_extension():
        return requires
    installed = importlib.machinery.PathFinder.find_spec("torch", sys.path + _installed_path())
    return [*requires, "ninja", *([] if installed else ["torch>=2.11"])]


def _show_installed() -> None:
    sys.path.extend(path for path in _installed_path() if path not in sys.path)


def get_requires_for_build_wheel(config_settings=None):
    return _requirements(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    if reason := why_no_extension():
        raise PlatformError(f"an editable install needs amp_ext's extension module, but {reason}")
    return _requirements(build_meta.get_requires_for_build_editable(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _show_installed()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _show_installed()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
