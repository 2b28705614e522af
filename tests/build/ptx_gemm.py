"""Check the PTX of the GEMM kernel for sm_80: the epilogue must not lose sums.

A warp finishes its sums in passes, and moves the remaining sums to the same registers for the next
pass. The compiler has dropped some of these moves.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TILES = Path(__file__).resolve().parents[2] / "csrc/kernels/gemm/plan/tiles.h"

STAGED_ROWS = 32  # of a warp in a pass, at most
LANES = 32


@cache
def tiles() -> list[tuple[int, int]]:
    """Return the rows and columns of a warp's part of each tile."""
    text = re.search(r"kGemmTiles\[\] = \{(.*?)\};", TILES.read_text(), re.DOTALL)
    found = re.findall(r"\{(\d+), (\d+), \d+, (\d+), (\d+), \d+, \w+\}", text[1])
    return [(int(m) // int(rows), int(n) // int(columns)) for m, n, rows, columns in found]


def handed_on(kernel: str, rows: int) -> int | None:
    """Return how many registers are set between the count of rows and the jump to the next pass.

    The result is None without such a loop.
    """
    loop = re.search(
        rf"add\.s32\s+(%r\d+), \1, {STAGED_ROWS};\s+setp\.\w+\.[us]32\s+(%p\d+), \1, {rows};\s+"
        r"((?:mov\.\w+\s+%\w+, %\w+;\s+)*)@\2 bra",
        kernel,
    )
    return loop and len(set(re.findall(r"mov\.\w+\s+(%\w+),", loop[3])))


def faults(ptx: str) -> list[str]:
    """Return the faults of the kernels in a text of PTX."""
    found, seen = [], set()
    for kernel in re.split(r"^(?=\.visible \.entry|\.entry)", ptx, flags=re.MULTILINE)[1:]:
        name = re.match(r"(?:\.visible )?\.entry (\w+)", kernel)[1]
        if not (number := re.search(r"11gemm_kernelI\w+?Li(\d+)E", name)):
            continue
        seen.add(int(number[1]))
        rows, columns = tiles()[int(number[1])]
        if rows <= STAGED_ROWS:
            continue
        wanted = (rows - STAGED_ROWS) * columns // LANES
        if (count := handed_on(kernel, rows)) != wanted:
            found.append(f"{name}: {count or 0} of {wanted} sums are handed on to the next pass")
    if missing := set(range(len(tiles()))) - seen:
        found.append(f"no PTX of gemm_kernel for tiles {sorted(missing)}")
    return found
