"""The backend ptx: csrc/kernels as compiled PTX, for tensors of the CPU, loaded into amp_ext."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_uint64
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from amp_ext import _C
from ptx_backend import build

ARCHITECTURE = "90a"


class Counters(ctypes.Structure):
    """ptx_backend::Counters: totals since the library was loaded."""

    names = ("launches", "blocks", "bytes_loaded", "bytes_stored", "bytes_copied", "most_loads")
    _fields_ = [(name, c_int64) for name in (*names, "parameter_bytes")]

    def __sub__(self, other: Counters) -> Counters:
        names = [name for name, _ in self._fields_]
        return Counters(*(getattr(self, name) - getattr(other, name) for name in names))


@dataclass(frozen=True)
class Schedule:
    """The order of blocks, warps and copies, and the number of multiprocessors."""

    seed: int = 0
    multiprocessors: int = 4


class Ptx:
    """Calls of the backend for tests, beside the ops."""

    def __init__(self, library: Path) -> None:
        _C.load_backend(str(library))
        self.functions = ctypes.CDLL(str(library))
        self.functions.ptx_seed.argtypes = [c_uint64]
        self.functions.ptx_pin.argtypes = [c_uint64, c_int]
        self.functions.ptx_force_tile.argtypes = [c_bool, c_int, c_int64]
        self.functions.ptx_calls.argtypes = [c_char_p]
        self.functions.ptx_calls.restype = c_int64
        self.functions.ptx_plan_text.restype = c_char_p

    def seed(self, seed: int) -> None:
        """Give each launch from now on a schedule of its own."""
        self.functions.ptx_seed(seed % 2**64)

    def pin(self, schedule: Schedule) -> None:
        """Give each launch this schedule, until the next test."""
        # The executor's order of threads is the seed modulo 3; its order of copies is the next
        # digit.
        seed = schedule.seed
        spread = seed // 9 * 9 + (seed + seed // 3) % 3 * 3 + seed % 3
        self.functions.ptx_pin(spread, schedule.multiprocessors)

    def set_sm90(self, sm90: bool) -> None:
        """Compute products by the kernel for sm_90a, with some tile, if it can."""
        self.functions.ptx_set_sm90(c_bool(sm90))

    def refuse_tensor_maps(self, refuse: bool) -> None:
        """Make the driver refuse each tensor map."""
        self.functions.ptx_refuse_tensor_maps(c_bool(refuse))

    def force_tile(self, sm90: bool = False, tile: int = -1, splits: int = 1) -> None:
        """Compute products with a tile if it can; with any if it is -1."""
        self.functions.ptx_force_tile(sm90, tile, splits)

    def plan(self) -> str:
        """Return the plan of the last product, in words."""
        return self.functions.ptx_plan_text().decode()

    def calls(self, op: str) -> int:
        """Return how often an op has been called, by its name in amp_ext/backend.h."""
        return self.functions.ptx_calls(op.encode())

    def counters(self) -> Counters:
        result = Counters()
        self.functions.ptx_counters(ctypes.byref(result))
        return result

    def cost(self, call: object, *arguments: object, **options: object) -> Counters:
        """Return the launches and moved bytes of a call."""
        before = self.counters()
        call(*arguments, **options)
        return self.counters() - before


@cache
def ptx() -> Ptx:
    """Return the library, built and loaded when it is first used."""
    return Ptx(build.kernels(ARCHITECTURE))
