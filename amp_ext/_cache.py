"""Keep the results for a device between processes, in a file of JSON lines.

The file is in the user's cache folder. Processes append lines, and readers skip damaged ones.
Another device, driver or build has another file. On a file system without atomic appends, such as
NFS, simultaneous entries may be lost.
"""

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from amp_ext._triton import triton_version


def read(device: str, part: str, types: Sequence[type]) -> list[list[Any]]:
    """Return the entries of a part that have fields of these types, the newest last."""
    try:
        content = path(device).read_bytes()
    except (OSError, RuntimeError):
        content = b""
    entries: list[list[Any]] = []
    for line in content.splitlines():
        try:
            found, *entry = json.loads(line)
        except (RecursionError, TypeError, ValueError):  # such as an unfinished line
            continue
        fits = all(type(x) is not int or -(2**63) <= x < 2**63 for x in entry)
        is_whole = [type(field) for field in entry] == list(types)
        if found == part and is_whole and fits:
            entries.append(entry)
    return entries


def append(device: str, part: str, entries: Iterable[Sequence[Any]]) -> bool:
    """Append entries to a part, and return whether they have been written."""
    # The first line feed ends a line that a process could not finish.
    text = "".join(f"\n{json.dumps([part, *entry])}" for entry in entries) + "\n"
    data = text.encode()
    try:
        file = path(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab", buffering=0) as appended:
            return appended.write(data) == len(data)  # at once: other processes append too
    except (OSError, RuntimeError):
        return False


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
    identity = hashlib.sha256(_identity(device).encode()).hexdigest()
    return folder() / f"{words}-{identity[:16]}.jsonl"


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
    hardware: Any = driver()
    if device == "cpu":  # hypervisors give different processors one name
        hardware = torch.backends.cpu.get_cpu_capability(), dict(torch.cpu.get_capabilities())
    software = (torch.__version__, torch.version.cuda, triton_version(), __version__, code)
    return json.dumps((device_name(device), hardware, *software))
