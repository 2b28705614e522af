"""Load PTX and launch its kernels, from Python."""

import ctypes
import itertools
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cudasim import build


class Fault(RuntimeError):
    """A rule that a kernel broke, with its place."""


@cache
def _library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.kernels()))
    for name in ("load", "launch"):
        getattr(loaded, f"cudasim_{name}").restype = ctypes.c_char_p
    for name in ("kernel", "allocate"):
        getattr(loaded, f"cudasim_{name}").restype = ctypes.c_void_p
    loaded.cudasim_instructions.restype = ctypes.c_uint64
    return loaded


def configure(**options: object) -> None:
    """Choose order, async, races and fresh for the launches to come."""
    os.environ.update({f"CUDASIM_{name.upper()}": str(value) for name, value in options.items()})
    _library().cudasim_configure()


class Array:
    """Global memory of one allocation."""

    def __init__(self, type_: type[Any], values: Sequence[Any] | int) -> None:
        """Allocate elements of a type of ctypes, from values or, given a count, without values."""
        self.count = values if isinstance(values, int) else len(values)
        self._memory = _library().cudasim_allocate(
            ctypes.c_size_t(ctypes.sizeof(type_) * self.count)
        )
        self.view = (type_ * self.count).from_address(self._memory)
        if not isinstance(values, int):
            self.view[:] = values

    def __del__(self) -> None:
        _library().cudasim_free(ctypes.c_void_p(self._memory))

    def pointer(self, offset: int = 0) -> ctypes.c_uint64:
        """Return the argument of a launch: the address, `offset` elements on."""
        return ctypes.c_uint64(self._memory + offset * ctypes.sizeof(self.view._type_))


class Module:
    """The kernels of a file of PTX."""

    def __init__(self, path: Path) -> None:
        self._module = ctypes.c_void_p()
        if error := _library().cudasim_load(str(path).encode(), ctypes.byref(self._module)):
            raise Fault(error.decode())

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        *arguments: Any,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end, or raise the Fault of a rule that it broke.

        The name is the symbol, or the beginning of the name without namespaces. Arguments are
        arrays, and numbers as types of ctypes; `shared` is bytes of dynamic shared memory. The
        seed chooses the schedule, where configure() leaves it open.
        """
        kernel = _library().cudasim_kernel(self._module, name.encode())
        if not kernel:
            raise KeyError(name)
        sizes = itertools.chain(*((*s, 1, 1)[:3] for s in (grid, block)), [shared])
        values = [a.pointer() if isinstance(a, Array) else a for a in arguments]
        pointers = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values]
        fault = _library().cudasim_launch(
            ctypes.c_void_p(kernel),
            (ctypes.c_uint32 * 7)(*sizes),
            (ctypes.c_void_p * max(len(pointers), 1))(*pointers),
            ctypes.c_uint64(seed),
        )
        if fault:
            raise Fault(fault.decode())
