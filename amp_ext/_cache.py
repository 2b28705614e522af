"""Small files that outlive a process, in the user's cache folder: a name -> a dict, as JSON."""

import functools
import json
import os
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def folder() -> Path:
    """``$XDG_CACHE_HOME/amp_ext``, by default ``~/.cache/amp_ext``; it need not exist.

    Raises:
        RuntimeError: there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "amp_ext")


def read(name: str) -> dict[str, Any] | None:
    """What was written under the name; None where that is nothing, or cannot be read."""
    try:
        content = json.loads((folder() / f"{name}.json").read_text())
    except (OSError, RuntimeError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write(name: str, content: dict[str, Any]) -> bool:
    """Writes it, whole or not at all; False where the folder cannot be written."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=folder(), prefix=name)
        try:
            with open(descriptor, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(unfinished, folder() / f"{name}.json")
        except BaseException:
            os.unlink(unfinished)
            raise
    except (OSError, RuntimeError):
        return False
    return True


@functools.cache
def fingerprint() -> str:
    """Of the code of this build: of the module, its libraries and the Triton kernels."""
    from amp_ext._library import _C, LIBRARIES

    files = [Path(_C.__file__), *LIBRARIES]
    kernels = find_spec("amp_ext.triton_kernels")
    for folder in kernels.submodule_search_locations if kernels else ():
        files += sorted(Path(folder).rglob("*.py"))
    code = json.dumps([(file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    return f"{zlib.crc32(code.encode()):08x}"
