"""Check the code of the GEMM kernels.

The kernel for sm_90a has few instructions from box to box of a plain result, and no integer
division in its consumers. The epilogue of the one for sm_80 must not lose sums: a warp finishes its
sums in passes, and moves the remaining sums to the same registers for the next pass. The compiler
has dropped some of these moves.
"""

import itertools
import re
from functools import cache
from pathlib import Path

from sass import Kernel

TILES = Path(__file__).resolve().parents[2] / "csrc/kernels/gemm/plan/tiles.h"

# Issue slots from one box of a plain result to the next one, with or without a bias. A box has 64
# rows of 128 bytes; a thread computes 32 of its 16-bit numbers or 16 of its 32-bit ones.
MOST_SLOTS = 128

STAGED_ROWS = 32  # of a warp in a pass, at most
LANES = 32


@cache
def tiles(table: str) -> list[list[str]]:
    """Return the fields of each tile in a table of tiles.h."""
    text = re.search(rf"{table}\[\] = \{{(.*?)\}};", TILES.read_text(), re.DOTALL)
    return [line.split(", ") for line in re.findall(r"\{(\d[^}]*)\}", text[1])]


# ---- sm_90a ------------------------------------------------------------------------------------


def boxes(kernel: Kernel) -> int:
    """Count the boxes of plain results that follow another: of 16 and 32 bits, with bias or not."""
    number = int(re.search(r"gemm_sm90_kernelI\w+?Li(\d+)E", kernel.name)[1])
    m, n, ping_pong = tiles("kSm90Tiles")[number]
    rows = int(m) // 64 if ping_pong == "true" else int(m) // 128
    narrow, wide = rows * int(n) // 32, rows * int(n) // 64
    return 2 * (wide - 1 + narrow - 1)


def slots(kernel: Kernel) -> list[int]:
    """Return the instructions from each box to the next one, for the shortest of them."""
    stores = [i for i, name in enumerate(kernel.sequence) if name.startswith("UTMASTG")]
    return sorted(b - a for a, b in itertools.pairwise(stores))[: boxes(kernel)]


def consumers(kernel: Kernel) -> list[str]:
    """Return the instructions of the warps that multiply."""
    begin, end = (
        next(i for i, name in enumerate(kernel.sequence) if name.startswith(f"USETMAXREG.{which}"))
        for which in ("TRY_ALLOC", "DEALLOC")
    )
    return kernel.sequence[begin : end if end > begin else None]


def faults_of_sm90(kernel: Kernel) -> list[str]:
    """Return the faults of one instance."""
    found = []
    counts = slots(kernel)
    if len(counts) < boxes(kernel) or counts[-1] > MOST_SLOTS:
        found.append(f"{counts[-1:]} instructions a box of a plain result, of at most {MOST_SLOTS}")
    if divisions := sum(re.match(r"I2F\..*RP$", name) is not None for name in consumers(kernel)):
        found.append(f"{divisions} integer divisions by those who multiply")
    return found


# ---- sm_80 -------------------------------------------------------------------------------------


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


def faults_of_sm80(ptx: str) -> list[str]:
    """Return the faults of the kernels in a text of PTX."""
    found, seen, all_tiles = [], set(), tiles("kGemmTiles")
    for kernel in re.split(r"^(?=\.visible \.entry|\.entry)", ptx, flags=re.MULTILINE)[1:]:
        name = re.match(r"(?:\.visible )?\.entry (\w+)", kernel)[1]
        if not (number := re.search(r"11gemm_kernelI\w+?Li(\d+)E", name)):
            continue
        seen.add(int(number[1]))
        m, n, _, warps_m, warps_n = map(int, all_tiles[int(number[1])][:5])
        rows, columns = m // warps_m, n // warps_n
        if rows <= STAGED_ROWS:
            continue
        wanted = (rows - STAGED_ROWS) * columns // LANES
        if (count := handed_on(kernel, rows)) != wanted:
            found.append(f"{name}: {count or 0} of {wanted} sums are handed on to the next pass")
    if missing := set(range(len(all_tiles))) - seen:
        found.append(f"no PTX of gemm_kernel for tiles {sorted(missing)}")
    return found
