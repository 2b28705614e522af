"""Compile the planner of the CUDA gemm (csrc/kernels/gemm/plan) at its first use.

Needs a C++ compiler, but no GPU, no CUDA toolkit and no amp_ext.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_int64
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_suffix(".cpp")
FOLDERS = (ROOT / "csrc/include", ROOT / "csrc/kernels")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")


@functools.cache
def _library() -> ctypes.CDLL:
    headers = [*FOLDERS[0].rglob("*.h"), *(FOLDERS[1] / "gemm/plan").glob("*.h")]
    sources = (SOURCE, SOURCE.with_name("plan_text.h"), *sorted(headers))
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
    library.gemm_variant.argtypes = [c_bool, c_int, c_int64]
    library.gemm_variant.restype = c_int64
    sizes, flags, cycles = [c_int64] * 3, [c_bool] * 3, POINTER(c_double)
    library.gemm_plan.argtypes = [*sizes, *flags, c_int, c_bool, c_int64, cycles]
    library.gemm_plan.restype = c_char_p
    return library


def gemm_tiles(sm90: bool) -> list[str]:
    """The tiles of gemm_sm90_kernel, or of gemm_kernel, in words, by their number."""
    tiles: list[str] = []
    while text := _library().gemm_tile(sm90, len(tiles)):
        tiles.append(text.decode())
    return tiles


class Forced(NamedTuple):
    """A tile, and how it cuts the product: as amp_ext._C.force_gemm_tile takes it."""

    tile: int
    splits: int = 1
    sm90: bool = True

    @property
    def variant(self) -> int:
        """The number of the variant in the CUDA backend.

        Raises:
            ValueError: there is no such tile, or it cannot be cut like this.
        """
        if not (variant := _library().gemm_variant(self.sm90, self.tile, self.splits)):
            raise ValueError(f"the CUDA gemm has no {self}")
        return variant


class Plan(NamedTuple):
    """How the CUDA gemm multiplies.

    Attributes:
        text: in words.
        cycles: that it is predicted to take.
    """

    text: str
    cycles: float


def gemm_plan(
    m: int,
    n: int,
    k: int,
    layout: str = "NN",
    *,
    fp32_out: bool = False,
    multiprocessors: int = 132,
    sm90: bool = True,
    forced: Forced | None = None,
) -> Plan:
    """How dense 16-bit matrices are multiplied.

    Raises:
        ValueError: the kernels cannot multiply matrices of these sizes.
    """
    if layout not in ("NN", "NT", "TN", "TT") or min(m, n, k, multiprocessors - 1) < 0:
        raise ValueError(f"expected a layout and sizes, got {m}, {n}, {k}, {layout}")
    transposed = (layout[0] == "T", layout[1] == "T")
    variant = forced.variant if forced else 0
    cycles = c_double()
    where = (multiprocessors, sm90, variant, ctypes.byref(cycles))
    text = _library().gemm_plan(m, n, k, *transposed, fp32_out, *where)
    if text is None:
        raise ValueError(f"the kernels cannot compute {m}x{n}x{k}")
    return Plan(text.decode(), cycles.value)
