"""Compile the planner of the CUDA gemm (csrc/kernels/gemm/plan) at its first use.

Needs a C++ compiler, but no GPU, no CUDA toolkit and no amp_ext.
"""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_int64, c_uint64
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_suffix(".cpp")
FOLDERS = (ROOT / "csrc/include", ROOT / "csrc/kernels")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")


@functools.cache
def _library() -> ctypes.CDLL:
    headers = [*FOLDERS[0].rglob("*.h"), *(FOLDERS[1] / "gemm").rglob("*.*h")]
    sources = (SOURCE, *sorted(headers))
    text = b"\0".join(path.read_bytes() for path in sources)
    path = ROOT / "build/planner" / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        folders = [f"-I{folder}" for folder in FOLDERS]
        command = [os.environ.get("CXX", "c++"), *FLAGS, *folders, SOURCE, "-o", unfinished]
        subprocess.run(command, check=True)
        unfinished.replace(path)
    library = ctypes.CDLL(str(path))
    library.gemm_tile.argtypes = [c_bool, c_int]
    library.gemm_tile.restype = c_char_p
    sizes, flags, cycles = [c_int64] * 3, [c_bool] * 3, POINTER(c_double)
    library.gemm_plan.argtypes = [*sizes, *flags, c_int, c_bool, c_int, c_int64, cycles]
    library.gemm_plan.restype = c_char_p
    library.gemm_broken_plan.argtypes = [c_uint64, c_bool]
    library.gemm_broken_plan.restype = c_char_p
    return library


def gemm_tiles(sm90: bool) -> list[str]:
    """Return the tiles of gemm_sm90_kernel, or of gemm_kernel, in words, by their number."""
    tiles: list[str] = []
    while text := _library().gemm_tile(sm90, len(tiles)):
        tiles.append(text.decode())
    return tiles


def broken_plan(seed: int, sm90: bool) -> str:
    """Return the broken invariant of a plan of random products; empty if all hold."""
    return _library().gemm_broken_plan(seed, sm90).decode()


class Plan(NamedTuple):
    """A plan of the CUDA gemm in words, with its numbers and predicted cycles."""

    text: str
    cycles: float
    tile: tuple[int, int, int]
    tiles: tuple[int, int]
    group: int
    blocks: int

    @property
    def sm90(self) -> bool:
        return self.text.startswith("sm90")

    @property
    def is_split(self) -> bool:
        return re.search(r"\d+ splits", self.text) is not None


def plan(
    m: int,
    n: int,
    k: int,
    layout: str = "NN",
    *,
    fp32_out: bool = False,
    multiprocessors: int = 132,
    sm90: bool = True,
    tile: int = -1,
    splits: int = 1,
) -> Plan:
    """Return the plan of dense 16-bit matrices, with a tile of sm_90a if it is not -1."""
    transposed = (layout[0] == "T", layout[1] == "T")
    cycles = c_double()
    how = (fp32_out, multiprocessors, sm90, tile, splits, ctypes.byref(cycles))
    text = _library().gemm_plan(m, n, k, *transposed, *how).decode()

    def numbers(pattern: str) -> tuple[int, ...]:
        return tuple(int(x) for x in re.findall(pattern, text)[0])

    tile_sizes, tiles = numbers(r"tile (\d+)x(\d+)x(\d+)"), numbers(r"(\d+)x(\d+) tiles")
    rest = numbers(r"groups of (\d+) rows; (\d+) blocks")
    return Plan(text, cycles.value, tile_sizes, tiles, *rest)
