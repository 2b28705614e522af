"""The table of measured products: a JSON file for each device and build; C++ has its entries.

Files that are damaged, or of another device or build, count as empty.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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


def path_of(device: torch.device) -> Path:
    """The user's table of a device.

    Raises:
        RuntimeError: there is no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "amp_ext" / file_name(device)


def file_name(device: torch.device) -> str:
    return f"gemm-{re.sub(r'[^A-Za-z0-9.+-]+', '-', identity(device))}.json"


def read(path: Path, of: str) -> dict[Key, Entry]:
    """The entries of a file that is of this identity."""
    try:
        stored = json.loads(path.read_text())
        if stored["of"] != of:
            return {}
        entries = [_checked(entry) for entry in stored["products"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {tuple(entry["key"]): entry for entry in entries}


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
    of = identity(device)
    known = read(PACKAGED / file_name(device), of)
    with suppress(RuntimeError):  # no home directory
        known |= read(path_of(device), of)
    _tell(device, known.values())


def update(device: torch.device, entries: Iterable[Entry]) -> Path:
    """Add entries to the user's table of a device, in place of older ones of the same products.

    The file is complete at any time, also for processes that read it now.

    Raises:
        OSError: it cannot be written; this process knows the entries nevertheless.
    """
    new = {tuple(entry["key"]): entry for entry in entries}
    path, of = path_of(device), identity(device)
    known = read(path, of) | new
    _tell(device, (read(PACKAGED / file_name(device), of) | known).values())
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry) for entry in known.values())
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(f'{{"of": {json.dumps(of)}, "products": [\n{lines}\n]}}\n')
    os.replace(file.name, path)
    return path


def _tell(device: torch.device, entries: Iterable[Entry]) -> None:
    from amp_ext._library import _C

    rows = [(e["key"], e["backend"], e["variant"], e["reason"]) for e in entries]
    _C.set_measured(str(device), rows)
