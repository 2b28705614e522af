"""Put amp_ext into a folder with the extension that is built already: for a rehearsal.

    python bench/borrow_build.py LIB

Builds for the CPU where there is none.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def extension() -> Path | None:
    """Of the source tree or else of the installed package."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.find_spec("amp_ext._C")
    return Path(spec.origin) if spec and spec.origin else None


def main() -> int:
    lib = Path(sys.argv[1]).resolve()
    sys.path = [path for path in sys.path if Path(path).resolve() != lib]
    try:
        found = extension()
    except ImportError:  # the package's __init__ found none
        found = None
    command = [sys.executable, "setup.py", "build_py" if found else "build", "--build-lib"]
    status = subprocess.run([*command, str(lib)], cwd=ROOT).returncode
    if found and not status:
        from base import copy_module  # here, since it imports amp_ext

        copy_module(found.parent, lib / "amp_ext")
        print(f"borrowed {found.name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
