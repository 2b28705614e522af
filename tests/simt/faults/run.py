"""Run a faulty kernel: python tests/simt/faults/run.py VARIANT KERNEL [SEED]."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simt.build import HERE, build
from simt.library import Library, Schedule

SOURCES = sorted((HERE / "faults").glob("*.cu"))
BLOCKS, THREADS = 2, 64
FLOATS = BLOCKS * THREADS


@cache
def library(variant: str) -> Library:
    return Library(build(variant, "faults", SOURCES))


def run(variant: str, kernel: str, seed: int = 0) -> tuple[int, str, list[float]]:
    """Launch a kernel on 0, 1, 2...; return the CUDA error, the report and the numbers after it."""
    malloc = ctypes.CDLL(None).malloc  # so that AddressSanitizer knows where it ends
    malloc.restype = ctypes.c_void_p
    data = (ctypes.c_float * FLOATS).from_address(malloc(ctypes.sizeof(ctypes.c_float) * FLOATS))
    data[:] = range(FLOATS)
    data[2] = 0.0
    error = library(variant).call(kernel, Schedule(seed), data, BLOCKS, THREADS)
    return error, library(variant).report(), list(data)


class Tensor(ctypes.Structure):
    """What a tensor map is made of: elements and a box of them by x, y, z, and strides in bytes."""

    _fields_ = [
        ("size", ctypes.c_uint64 * 3),
        ("strides", ctypes.c_uint64 * 2),
        ("box", ctypes.c_uint32 * 3),
    ]


def encode(address: int, type: int, swizzle: int, tensor: Tensor) -> tuple[int, str]:
    """Make a tensor map; return the CUDA error and the report."""
    data = ctypes.c_void_p(address)
    error = library("plain").call("encode", Schedule(), data, type, swizzle, ctypes.byref(tensor))
    return error, library("plain").report()


if __name__ == "__main__":
    variant, kernel, *seed = sys.argv[1:]
    error, report, data = run(variant, kernel, *map(int, seed))
    print(error, report, data[:4])
    sys.exit(error != 0)
