"""The PEP 517 build backend: setuptools, which compiles against the installed torch.

pip builds in an environment of its own, which hides the installed packages. A torch downloaded into
that environment could differ from the one that amp_ext will be imported with. The hooks therefore
look for torch where the interpreter finds its packages outside of that environment.
"""

import importlib.machinery
import json
import os
import subprocess
import sys

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TORCH = "torch>=2.11"


def installed_path() -> list[str]:
    """Return the interpreter's sys.path without pip's changes to the environment."""
    hidden_by = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in hidden_by}
    script = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", script], env=env))


def get_requires_for_build_wheel(config_settings=None):
    """Require torch where none is installed, without importing it: an import takes seconds."""
    path = sys.path + installed_path()
    found = importlib.machinery.PathFinder.find_spec("torch", path)
    return [] if found and found.origin else [TORCH]


get_requires_for_build_editable = get_requires_for_build_wheel


def show_installed_torch() -> None:
    sys.path.extend(path for path in installed_path() if path not in sys.path)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    show_installed_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    show_installed_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
