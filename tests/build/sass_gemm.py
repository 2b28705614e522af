"""Check the machine code of the sm_90a GEMM kernel:

few instructions from box to box of a plain result, and no integer division in consumers.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

from sass import Kernel

TILES = Path(__file__).resolve().parents[2] / "csrc/kernels/gemm/plan/tiles.h"

# Issue slots from one box of a plain result to the next one, with or without a bias. A box has 64
# rows of 128 bytes; a thread computes 32 of its 16-bit numbers or 16 of its 32-bit ones.
MOST_SLOTS = 128


@cache
def tiles() -> list[tuple[int, int, bool]]:
    """Return rows, columns and whether it is for ping-pong of each tile."""
    text = re.search(r"kSm90Tiles\[\] = \{(.*?)\};", TILES.read_text(), re.DOTALL)
    found = re.findall(r"\{(\d+), (\d+), (true|false)\}", text[1])
    return [(int(m), int(n), ping_pong == "true") for m, n, ping_pong in found]


def boxes(kernel: Kernel) -> int:
    """Count the boxes of plain results that follow another: of 16 and 32 bits, with bias or not."""
    m, n, ping_pong = tiles()[int(re.search(r"gemm_sm90_kernelI\w+?Li(\d+)E", kernel.name)[1])]
    rows = (m if ping_pong else m // 2) // 64
    narrow, wide = rows * n // 32, rows * n // 64
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


def faults(kernel: Kernel) -> list[str]:
    """Return the faults of one instance."""
    found = []
    counts = slots(kernel)
    if len(counts) < boxes(kernel) or counts[-1] > MOST_SLOTS:
        found.append(f"{counts[-1:]} instructions a box of a plain result, of at most {MOST_SLOTS}")
    if divisions := sum(re.match(r"I2F\..*RP$", name) is not None for name in consumers(kernel)):
        found.append(f"{divisions} integer divisions by those who multiply")
    return found
