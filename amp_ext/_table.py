"""The measured products of a device: a JSON file, and what C++ knows of it.

A file that is damaged, or of another device or build, counts as empty.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch

import amp_ext
from amp_ext import _cache
from amp_ext._triton import triton_version
from amp_ext._warnings import warn

Key = tuple[int, ...]


class Entry(NamedTuple):
    """What computes a product.

    Attributes:
        product: in words.
        key: GemmKey in table.h.
        backend: its name.
        variant: which of its plans, as GemmArgs::variant has it.
        reason: why this is the choice.
    """

    product: str
    key: list[int]
    backend: str
    variant: int
    reason: str


def cpu_name() -> str:
    """The processor's."""
    try:
        with open("/proc/cpuinfo") as file:  # which is long where there are many processors
            line = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


@functools.cache
def identity(device: torch.device) -> str:
    """What measurements hold for: the device and the build."""
    from amp_ext._library import CUDA_ARCHES

    if device.type == "cpu":
        name = f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
        software: list[str | None] = []
    else:
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name} {gpu.major}.{gpu.minor}"
        software = ["CUDA", torch.version.cuda, *CUDA_ARCHES, "Triton", triton_version()]
    build = [amp_ext.__version__, _cache.fingerprint()]
    words = [name, "amp_ext", *build, "torch", torch.__version__, *software]
    return " ".join(map(str, words))


def file_name(device: torch.device) -> str:
    """For amp_ext._cache."""
    return f"gemm-{re.sub(r'[^A-Za-z0-9.+-]+', '-', identity(device))}"


def read(device: torch.device) -> dict[Key, Entry]:
    """The entries of a device's file."""
    stored = _cache.read(file_name(device))
    if stored is None:
        return {}
    try:
        if stored["of"] != identity(device):
            return {}
        return {tuple(each["key"]): _checked(Entry(**each)) for each in stored["products"]}
    except (TypeError, KeyError, ValueError):
        return {}


def _checked(entry: Entry) -> Entry:
    from amp_ext._library import _C

    numbers = [*entry.key, entry.variant]
    if (
        len(entry.key) != _C.GEMM_KEY_SIZE
        or not all(type(number) is int and abs(number) < 2**63 for number in numbers)
        or not all(type(text) is str for text in (entry.product, entry.backend, entry.reason))
    ):
        raise ValueError(f"not an entry: {entry}")
    return entry


_known: dict[torch.device, dict[Key, Entry]] = {}  # what C++ knows


def load(device: str) -> None:
    """For C++, at the first product on a device: has it know the entries."""
    _tell(torch.device(device), read(torch.device(device)))


def update(device: torch.device, entries: Iterable[Entry]) -> None:
    """Adds entries to those of a device, in place of older ones of the same products.

    Where the file cannot be written, this process knows them nevertheless, and a warning says so.
    """
    new = {tuple(entry.key): entry for entry in entries}
    with _cache.locked():
        known = _known.get(device, {}) | read(device) | new
        products = [entry._asdict() for entry in known.values()]
        content = {"of": identity(device), "products": products}
        is_written = _cache.write(file_name(device), content)
    _tell(device, known)
    if not is_written:
        warn("amp_ext: cannot write measurements to the cache folder")


def _tell(device: torch.device, entries: dict[Key, Entry]) -> None:
    from amp_ext._library import _C

    _known[device] = entries
    _C.set_measured(str(device), [tuple(entry[1:]) for entry in entries.values()])
