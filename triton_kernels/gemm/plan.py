"""The tile of a product and its splits along k, by a fixed table."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple


class Tile(NamedTuple):
    """A part of the result, the step along k, and the program that computes them."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int
    """Programs of a multiprocessor."""

    def parts(self, vector: int) -> int:
        """Return the number of parts, side by side, in which the epilogue takes the tile.

        A thread needs registers for a part's elements, for elements of c, and for an address of
        each vector.
        """
        elements = 16 if vector >= 4 else 8
        return max(1, self.m * self.n // (self.warps * 32 * elements))


# Larger tiles first: they load fewer bytes for each product. Shared memory is (m + n) * k * 2 bytes
# a stage. Capabilities 8.6, 8.9 and 12.x limit it to 99 KiB and use AMPERE; 9.0 to 11.0 limit it to
# 227 KiB.
AMPERE = (
    Tile(128, 256, 32, warps=8, stages=4, programs=1),
    Tile(128, 128, 32, warps=8, stages=4, programs=1),
    Tile(64, 64, 64, warps=4, stages=3, programs=3),
)
HOPPER = (
    Tile(128, 256, 64, warps=8, stages=4, programs=1),
    Tile(128, 128, 64, warps=4, stages=3, programs=2),
    Tile(64, 64, 64, warps=4, stages=4, programs=3),
)
FEW_ROWS = Tile(16, 64, 128, warps=4, stages=4, programs=2)
UNALIGNED = Tile(64, 64, 32, warps=4, stages=3, programs=3)
"""For loads of one or two elements, each of which takes registers for its address."""
INTERPRETED = (
    Tile(512, 512, 512, warps=512, stages=1, programs=1),
    Tile(256, 256, 128, warps=128, stages=1, programs=1),
    Tile(32, 64, 32, warps=4, stages=1, programs=1),
)

MOST_SPLITS = 32
STEPS_OF_SPLIT = 8  # at least: a pipeline is full most of the time


class Device(NamedTuple):
    """The properties of a device that plans depend on."""

    capability: int
    """10 * major + minor; 0 is Triton's interpreter."""
    multiprocessors: int

    @property
    def has_tma(self) -> bool:
        # On 12.0 Triton keeps the state of TMA in local memory.
        return self.capability // 10 in (0, 9, 10, 11)


class Plan(NamedTuple):
    """A tile, the splits of its steps along k, and the splits of all tiles."""

    tile: Tile
    splits: int
    units: int


def plans(
    device: Device, vector: int, batch: int, terms: int, m: int, n: int, k: int
) -> list[Plan]:
    """Return a plan for each tile: first the largest tile that keeps the device at work.

    A device is at work with units for three in four multiprocessors. Operands are loaded by at
    least `vector` elements.
    """
    tiles = HOPPER if device.has_tma else AMPERE
    if device.capability == 0:
        tiles = INTERPRETED
    elif vector <= 2 or m <= 32:
        tiles = (UNALIGNED if vector <= 2 else FEW_ROWS,)
    found = []
    for tile in [x for x in tiles if x.m < 2 * m and x.n < 2 * n] or tiles[-1:]:
        count = batch * ceil(m / tile.m) * ceil(n / tile.n)
        room = device.multiprocessors * tile.programs // count
        steps = ceil(k / tile.k) * terms
        splits = max(1, min(room, steps // STEPS_OF_SPLIT, MOST_SPLITS))
        found.append(Plan(tile, splits, count * splits))
    enough = device.multiprocessors * 3 // 4
    return sorted(found, key=lambda plan: -min(plan.units, enough))
