"""The backend simt: csrc/kernels as the CPU executes them, loaded into amp_ext.

The environment variable AMP_EXT_SIMT chooses a variant of build.py; that of a sanitizer also needs
its runtime preloaded. AMP_EXT_SIMT_LIBRARY is a library that has been built already.
"""

from __future__ import annotations

import os
from ctypes import c_bool, c_char_p, c_int, c_int64, c_uint64
from functools import cache

from amp_ext import _C
from simt.build import build
from simt.library import Counters, Library, Schedule


class Simt(Library):
    """What the tests ask of the backend, beside the ops."""

    def __init__(self, path: str) -> None:
        _C.load_backend(path)
        super().__init__(path)
        self.functions.simt_seed.argtypes = [c_uint64]
        self.functions.simt_pin.argtypes = [c_uint64, c_int, c_int]
        self.functions.simt_force_tile.argtypes = [c_bool, *[c_int] * 3, *[c_int64] * 3]
        self.functions.simt_calls.argtypes = [c_char_p]
        self.functions.simt_calls.restype = c_int64
        self.functions.simt_plan_text.restype = c_char_p
        self.functions.simt_check_plans.argtypes = [c_uint64, c_bool]
        self.functions.simt_check_plans.restype = c_char_p

    def seed(self, seed: int) -> None:
        """Give each launch from now on a schedule of its own."""
        self.functions.simt_seed(seed % 2**64)

    def pin(self, schedule: Schedule) -> None:
        """Give each launch this schedule, until the next test."""
        self.functions.simt_pin(schedule.seed, schedule.resident_blocks, schedule.multiprocessors)

    def set_sm90(self, sm90: bool) -> None:
        """Have products computed by the kernel for sm_90a, with some tile, where it can."""
        self.functions.simt_set_sm90(c_bool(sm90))

    def set_capability(self, capability: int) -> None:
        """Have the device say that this is its compute capability, 90 for 9.0; 0 for none."""
        self.functions.simt_set_capability(capability)

    def refuse_tensor_maps(self, refuse: bool) -> None:
        """Have the driver refuse each tensor map."""
        self.functions.simt_refuse_tensor_maps(c_bool(refuse))

    def force_tile(
        self,
        sm90: bool = False,
        tile: int = -1,
        cluster: tuple[int, int] = (1, 1),
        splits: int = 1,
        whole: int = -1,
        ranges: int = 0,
    ) -> None:
        """Have products computed with a tile, where it can; with any if it is -1."""
        self.functions.simt_force_tile(sm90, tile, *cluster, splits, whole, ranges)

    def plan(self) -> str:
        """Return the plan of the last product, in words."""
        return self.functions.simt_plan_text().decode()

    def calls(self, op: str) -> int:
        """Return how often an op has been called, by its name in amp_ext/backend.h."""
        return self.functions.simt_calls(op.encode())

    def check_plans(self, seed: int, sm90: bool) -> str:
        """Return what does not hold for some plan of random products; empty if all is well."""
        return self.functions.simt_check_plans(seed, sm90).decode()

    def cost(self, call: object, *arguments: object, **options: object) -> Counters:
        """Return what a call launches and moves."""
        before = self.counters()
        call(*arguments, **options)
        return self.counters() - before


@cache
def simt() -> Simt:
    """Return the library, built and loaded when it is first used."""
    path = os.environ.get("AMP_EXT_SIMT_LIBRARY")
    return Simt(path or str(build(os.environ.get("AMP_EXT_SIMT", "plain"))))
