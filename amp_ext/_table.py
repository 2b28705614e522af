"""The table of measured products: a JSON file for each device and build; C++ has its entries.

Files that are damaged, or of another device or build, count as empty.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from amp_ext import _cache

PACKAGED = Path(__file__).parent / "tables"
"""Tables that come with the package; the user's own come first."""

Key = tuple[int, ...]
Entry = dict[str, Any]
"""key, backend, variant, reason; and product, in words."""


def cpu_name() -> str:
    """The processor's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def identity(device: torch.device) -> str:
    """What measurements hold for: the device and the build."""
    import amp_ext
    from amp_ext._triton import triton_version

    if device.type == "cpu":
        name = f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
        software: list[str | None] = []
    else:
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name} {gpu.major}.{gpu.minor}"
        software = ["CUDA", torch.version.cuda, "Triton", triton_version()]
    words = [name, "amp_ext", amp_ext.__version__, "torch", torch.__version__, *software]
    return " ".join(map(str, words))


def name_of(device: torch.device) -> str:
    """Of the file, for amp_ext._cache."""
    return f"gemm-{re.sub(r'[^A-Za-z0-9.+-]+', '-', identity(device))}"


def read(device: torch.device) -> dict[Key, Entry]:
    """The user's own entries."""
    return _entries(_cache.read(name_of(device)), device)


def _packaged(device: torch.device) -> dict[Key, Entry]:
    try:
        stored = json.loads((PACKAGED / f"{name_of(device)}.json").read_text())
    except (OSError, ValueError):
        return {}
    return _entries(stored, device)


def _entries(stored: Any, device: torch.device) -> dict[Key, Entry]:
    """None of a file that is damaged, or of another device or build."""
    try:
        if stored["of"] != identity(device):
            return {}
        return {tuple(entry["key"]): _checked(entry) for entry in stored["products"]}
    except (TypeError, KeyError, ValueError):
        return {}


def _checked(entry: Entry) -> Entry:
    from amp_ext._library import _C

    is_entry = (
        len(entry["key"]) == _C.GEMM_KEY_SIZE
        and all(type(field) is int and abs(field) < 2**63 for field in entry["key"])
        and type(entry["variant"]) is int
        and 0 <= entry["variant"] < 2**63
        and all(type(entry[name]) is str for name in ("product", "backend", "reason"))
    )
    if not is_entry:
        raise ValueError(f"not an entry: {entry}")
    return entry


def load(name: str) -> None:
    """Have C++ know the entries of a device; at the first product on it."""
    device = torch.device(name)
    _tell(device, _packaged(device) | read(device))


def update(device: torch.device, entries: Iterable[Entry]) -> None:
    """Add entries to the user's table of a device, in place of older ones of the same products.

    Where it cannot be written, this process knows them nevertheless, and a warning says so.
    """
    known = read(device) | {tuple(entry["key"]): entry for entry in entries}
    _tell(device, _packaged(device) | known)
    content = {"of": identity(device), "products": list(known.values())}
    _cache.write(name_of(device), content)
    if _cache.read(name_of(device)) != content:
        warnings.warn("amp_ext: cannot write measurements to the cache folder", stacklevel=2)


def _tell(device: torch.device, entries: dict[Key, Entry]) -> None:
    from amp_ext._library import _C

    rows = [(e["key"], e["backend"], e["variant"], e["reason"]) for e in entries.values()]
    _C.set_measured(str(device), rows)
