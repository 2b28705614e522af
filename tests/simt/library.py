"""A library that build.py has made, for Python: its functions launch kernels in a schedule."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int64, c_uint64
from dataclasses import dataclass
from pathlib import Path


class Counters(ctypes.Structure):
    """simt::Counters: totals since the library was loaded."""

    _fields_ = [
        (name, c_int64)
        for name in (
            *("launches", "blocks", "switches"),
            *("bytes_loaded", "bytes_stored", "bytes_copied", "most_loads", "parameter_bytes"),
        )
    ]

    def __sub__(self, other: Counters) -> Counters:
        names = [name for name, _ in self._fields_]
        return Counters(*(getattr(self, name) - getattr(other, name) for name in names))


@dataclass(frozen=True)
class Schedule:
    """The order in which threads run; see simt::Options."""

    seed: int = 0
    resident_blocks: int = 2
    multiprocessors: int = 4


class Library:
    """Kernels and the executor."""

    def __init__(self, path: Path | str) -> None:
        self.functions = ctypes.CDLL(str(path))
        self.functions.simt_report.restype = c_char_p
        self.functions.simt_set_options.argtypes = [c_uint64, c_int, c_int]

    def call(self, name: str, schedule: Schedule, *arguments: object) -> int:
        """Call a function; return what it returns, 0 if all is well."""
        self.functions.simt_set_options(
            schedule.seed, schedule.resident_blocks, schedule.multiprocessors
        )
        return getattr(self.functions, name)(*arguments)

    def report(self) -> str:
        """Return the fault of the last launch or tensor map; empty if there was none."""
        return self.functions.simt_report().decode()

    def counters(self) -> Counters:
        result = Counters()
        self.functions.simt_counters(ctypes.byref(result))
        return result
