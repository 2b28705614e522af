"""Small files that outlive a process, in the user's cache folder: a name -> a dict, as JSON."""

import contextlib
import fcntl
import functools
import json
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20
"""Larger files are neither read nor written."""
LOCK_SECONDS = 10.0
"""A process that holds the lock longer, such as a stopped one, is not waited for."""


def folder() -> Path:
    """``$XDG_CACHE_HOME/amp_ext``, by default ``~/.cache/amp_ext``; it need not exist.

    The XDG specification says to ignore a relative path.

    Raises:
        RuntimeError: there is no home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else Path.home() / ".cache", "amp_ext")


def read(name: str) -> dict[str, Any] | None:
    """Return what was written under the name; None where there is no readable regular file."""
    try:
        # Opening a FIFO would wait for a writer.
        descriptor = os.open(folder() / f"{name}.json", os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return None
            content = json.load(file)
    except (OSError, RuntimeError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write(name: str, content: dict[str, Any]) -> bool:
    """Write it, whole or not at all; False where it is too large or the folder not writable."""
    text = json.dumps(content, indent=1)
    if len(text) > MAX_BYTES:
        return False
    try:
        folder().mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=folder(), prefix=name)
        try:
            with open(descriptor, "w") as file:
                file.write(text)
            os.replace(unfinished, folder() / f"{name}.json")
        except BaseException:
            os.unlink(unfinished)
            raise
    except (OSError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Exclude other threads and processes from the region, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        try:
            folder().mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, descriptor)
            _lock(descriptor)
        except (OSError, RuntimeError):
            pass  # no folder, or no locks, as on some mounts of Lustre
        yield


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.002)
    return None


@functools.cache
def fingerprint() -> str:
    """Of the code of this build: of the module, its libraries and the Triton kernels."""
    from amp_ext._library import _C, LIBRARIES

    files = [Path(_C.__file__), *LIBRARIES]
    kernels = find_spec("amp_ext.triton_kernels")
    for folder in (kernels.submodule_search_locations if kernels else None) or ():
        files += sorted(Path(folder).rglob("*.py"))
    code = json.dumps([(file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    return f"{zlib.crc32(code.encode()):08x}"
