"""Keep the results for a device between processes, in a JSON file.

The file is in the user's cache folder. A damaged file, or one of another device, driver or build,
counts as empty.
"""

import contextlib
import fcntl
import functools
import json
import os
import platform
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from amp_ext._triton import triton_version

MAX_BYTES = 16 << 20
"""Larger files are neither read nor written."""
LOCK_SECONDS = 10.0
"""The longest wait for another process, such as a stopped one."""

Part = Any
"""A part of a record: a value of JSON, or None."""


def read(device: str, part: str) -> Part:
    """Return a part of the record of a device, or None."""
    return _read(device).get(part)


def update(device: str, part: str, change: Callable[[Part], Part]) -> bool:
    """Replace a part of a device's record, whole or not at all.

    Returns False if the new record is too large or the folder is not writable.
    """
    with _locked():
        record = _read(device) | {"identity": _identity(device)}
        text = json.dumps({**record, part: change(record.get(part))}, indent=1)
        if len(text) > MAX_BYTES:
            return False
        try:
            folder().mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=folder())
            try:
                with open(descriptor, "w") as file:
                    file.write(text)
                os.replace(unfinished, path(device))
            except BaseException:
                os.unlink(unfinished)
                raise
        except (OSError, RuntimeError):
            return False
        return True


def folder() -> Path:
    """Return ``$XDG_CACHE_HOME/amp_ext``, by default ``~/.cache/amp_ext``; it need not exist.

    The XDG specification says to ignore a relative path.

    Raises:
        RuntimeError: there is no home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else Path.home() / ".cache", "amp_ext")


def path(device: str) -> Path:
    """Return the file of a device."""
    words = re.sub(r"[^A-Za-z0-9.+-]+", "-", device_name(device))
    return folder() / f"{words}-{zlib.crc32(_identity(device).encode()):08x}.json"


def devices() -> list[str]:
    """Return the CPU and the visible GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(gpus))]


def device_name(device: str) -> str:
    """Return the name and compute capability of a GPU, or the processor's name."""
    if device != "cpu":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"
    try:
        with open("/proc/cpuinfo") as file:  # long on a machine with many processors
            line = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


def driver() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"


@functools.cache
def _identity(device: str) -> str:
    """Return all that verifications and measurements depend on."""
    from amp_ext import __version__
    from amp_ext._library import _C, LIBRARIES

    files = [Path(_C.__file__), *LIBRARIES]
    kernels = find_spec("amp_ext.triton_kernels")
    for where in (kernels.submodule_search_locations if kernels else None) or ():
        files += sorted(Path(where).rglob("*.py"))
    code = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    cpu = torch.backends.cpu.get_cpu_capability() if device == "cpu" else driver()
    software = (torch.__version__, torch.version.cuda, triton_version(), __version__, code)
    return json.dumps((device_name(device), cpu, *software))


def _read(device: str) -> dict[str, Part]:
    try:
        # Opening a FIFO would wait for a writer.
        descriptor = os.open(path(device), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return {}
            record = json.load(file)
    except (OSError, RuntimeError, ValueError):
        return {}
    is_own = isinstance(record, dict) and record.get("identity") == _identity(device)
    return record if is_own else {}


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Exclude other threads and processes, if the file system has locks."""
    with contextlib.ExitStack() as stack:
        try:
            folder().mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, descriptor)
            deadline = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.002)
        except (OSError, RuntimeError):
            pass  # the folder or locks are missing, as on some mounts of Lustre
        yield
