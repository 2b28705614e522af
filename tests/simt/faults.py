"""Run a kernel of faults*.cu: python tests/simt/faults.py VARIANT KERNEL [SEED]."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simt.build import HERE, build
from simt.library import Library, Schedule

SOURCES = [HERE / "faults.cu", HERE / "faults_sm90.cu"]
BLOCKS, THREADS = 2, 64
FLOATS = BLOCKS * THREADS


def run(variant: str, kernel: str, seed: int = 0) -> tuple[int, str, list[float]]:
    """Launch a kernel on 0, 1, 2...; return the CUDA error, the report and the numbers after it."""
    library = Library(build(variant, "faults", SOURCES))
    malloc = ctypes.CDLL(None).malloc  # so that AddressSanitizer knows where it ends
    malloc.restype = ctypes.c_void_p
    data = (ctypes.c_float * FLOATS).from_address(malloc(ctypes.sizeof(ctypes.c_float) * FLOATS))
    data[:] = range(FLOATS)
    data[2] = 0.0
    error = library.call(kernel, Schedule(seed), data, BLOCKS, THREADS)
    return error, library.report(), list(data)


if __name__ == "__main__":
    variant, kernel, *seed = sys.argv[1:]
    error, report, data = run(variant, kernel, *map(int, seed))
    print(error, report, data[:4])
    sys.exit(error != 0)
