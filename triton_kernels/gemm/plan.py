"""The tile size of a product, its number of splits along k, and the order of its tiles.

The figures are those of data sheets and of the kernels' structure: the choices are predictions.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Tile(NamedTuple):
    """A part of the result, the step along k, and the program that computes it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int
    """Programs that a multiprocessor has at a time."""

    def parts(self, vector: int) -> int:
        """Return into how many parts, side by side, the epilogue divides the tile: a thread needs
        registers for a part's elements, for those of c and aux, and for their addresses.
        """
        elements = 32 if vector >= 4 else 8
        return max(1, self.m * self.n // (self.warps * 32 * elements))

    @property
    def shared_bytes(self) -> int:
        """What the stages hold, and a bit for their barriers."""
        return (self.m + self.n) * self.k * 2 * self.stages + 1024


class Architecture(NamedTuple):
    """Figures of one multiprocessor, in cycles."""

    name: str
    products: float
    """Of 16-bit numbers, per cycle."""
    l2_bytes: float
    """Its share of what L2 gives per cycle."""
    latency: float
    """Until a load from device memory is there."""
    tiles: tuple[Tile, ...]


AMPERE = Architecture(
    "sm_80",
    *(1024, 40, 800),
    tiles=(
        Tile(128, 256, 32, warps=8, stages=4, resident=1),
        Tile(128, 128, 32, warps=4, stages=4, resident=2),
        Tile(128, 64, 64, warps=4, stages=3, resident=2),
        Tile(64, 128, 32, warps=4, stages=4, resident=3),
        Tile(64, 64, 64, warps=4, stages=3, resident=3),
        Tile(16, 64, 128, warps=4, stages=4, resident=2),
    ),
)
HOPPER = Architecture(
    "sm_90",
    *(2048, 48, 900),
    tiles=(
        Tile(128, 256, 64, warps=8, stages=4, resident=1),
        Tile(256, 128, 64, warps=8, stages=4, resident=1),
        Tile(128, 128, 64, warps=4, stages=3, resident=2),
        Tile(128, 64, 64, warps=4, stages=4, resident=2),
        Tile(64, 128, 64, warps=4, stages=4, resident=2),
        Tile(64, 64, 64, warps=4, stages=4, resident=3),
        Tile(16, 64, 128, warps=4, stages=5, resident=2),
    ),
)
BLACKWELL = Architecture(
    "sm_100",
    *(4096, 64, 900),
    tiles=(
        Tile(128, 256, 64, warps=8, stages=4, resident=1),
        Tile(128, 128, 64, warps=4, stages=3, resident=2),
        Tile(128, 64, 64, warps=4, stages=4, resident=2),
        Tile(64, 128, 64, warps=4, stages=4, resident=2),
        Tile(64, 64, 64, warps=4, stages=4, resident=3),
        Tile(16, 64, 128, warps=4, stages=5, resident=2),
    ),
)
INTERPRETER = Architecture(
    "interpreter",
    *(1, 1, 1),
    tiles=(
        # In two parts where rows are not aligned.
        Tile(32, 64, 32, warps=4, stages=1, resident=1),
        Tile(64, 64, 64, warps=8, stages=1, resident=1),
        Tile(256, 256, 128, warps=128, stages=1, resident=1),
        Tile(512, 512, 512, warps=512, stages=1, resident=1),
    ),
)
UNALIGNED = Tile(64, 64, 32, warps=4, stages=3, resident=3)
"""For loads of single elements, each of which takes registers for its address."""

MOST_SPLITS = 64
STEPS_OF_SPLIT = 4  # at least, so that pipelines are full for most of the time
LAUNCH = 2500  # cycles until a second kernel is at work


class Device(NamedTuple):
    """What a plan depends on."""

    capability: int
    """10 * major + minor; 0 is Triton's interpreter."""
    multiprocessors: int
    shared_bytes: int
    """That a program may have."""

    @property
    def architecture(self) -> Architecture:
        if self.capability == 0:
            return INTERPRETER
        if self.capability // 10 == 9:
            return HOPPER
        return BLACKWELL if self.capability // 10 in (10, 11) else AMPERE

    @property
    def has_tma(self) -> bool:
        # On 12.0 what Triton makes of it keeps its state in local memory.
        return self.capability == 0 or self.capability // 10 in (9, 10, 11)


INTERPRETED_DEVICE = Device(capability=0, multiprocessors=3, shared_bytes=2**30)


class Problem(NamedTuple):
    """A product, its result's batch, and the terms that are summed up in each of its matrices."""

    m: int
    n: int
    k: int
    batch: int
    terms: int
    element_bytes: int
    """Of one element of the result and of all that belongs to it."""
    vector: int
    """Elements that one load of an operand takes at least."""


class Plan(NamedTuple):
    """How a product is computed."""

    tile: Tile
    splits: int
    tiles_m: int
    tiles_n: int
    group: int
    """Rows of tiles that are walked together, column by column."""
    steps_of_term: int
    steps: int
    units: int
    programs: int
    cycles: float
    """As predicted."""


def _predicted(p: Problem, t: Tile, splits: int, device: Device) -> float:
    """Return cycles. Each multiprocessor gets some rounds of units, as many at a time as fit. It
    takes as long as its tensor cores or its memory need, or as its units wait.
    """
    _, products, l2_bytes, latency, _ = device.architecture
    units = max(1, _tiles_of(p, t)) * splits
    rounds = math.ceil(units / device.multiprocessors)
    at_a_time = min(rounds, t.resident)
    steps = math.ceil(_steps_of(p, t) / splits)
    step_bytes = (t.m + t.n) * t.k * 2
    # Loads of less than 16 bytes take more instructions, which a step has to issue.
    loads = step_bytes / l2_bytes * (1 if p.vector == 8 else 4 / p.vector)
    busy_step = max(t.m * t.n * t.k / products, loads)
    finish = t.m * t.n * p.element_bytes / l2_bytes
    share = t.m * t.n * 4 / l2_bytes
    busy = rounds * (steps * busy_step + finish)
    waits = steps * latency / max(1, t.stages - 1) + 2 * latency + finish
    waiting = math.ceil(rounds / at_a_time) * waits
    cycles = max(busy, waiting)
    # Splits have to promise a tenth: they take memory, and their cost is the least certain.
    return cycles if splits == 1 else (cycles + share * (splits + 1) + LAUNCH) / 0.9


def _tiles_of(p: Problem, t: Tile) -> int:
    return p.batch * math.ceil(p.m / t.m) * math.ceil(p.n / t.n)


def _steps_of(p: Problem, t: Tile) -> int:
    return math.ceil(p.k / t.k) * p.terms


def _most_splits(p: Problem, t: Tile, device: Device) -> int:
    """Return how many keep multiprocessors at work: one where there are tiles for all of them."""
    tiles = _tiles_of(p, t)
    if tiles == 0 or tiles >= 2 * device.multiprocessors:
        return 1
    room = 2 * device.multiprocessors * t.resident // tiles
    return max(1, min(room, _steps_of(p, t) // STEPS_OF_SPLIT, MOST_SPLITS))


def _group_rows(t: Tile, tiles_m: int, tiles_n: int, device: Device) -> int:
    """Return the height of a group: programs at work together should read few different lines."""
    together = device.multiprocessors * t.resident

    def lines(group: int) -> int:
        columns = min(tiles_n, math.ceil(together / group))
        rows = min(tiles_m, math.ceil(together / columns))
        return rows * t.m + columns * t.n

    return min((g for g in (1, 2, 4, 8, 16, 32, 64) if g == 1 or g <= tiles_m), key=lines)


def plan_with(p: Problem, t: Tile, splits: int, device: Device) -> Plan:
    """Return the plan with this tile and number of splits."""
    tiles_m, tiles_n = math.ceil(p.m / t.m), math.ceil(p.n / t.n)
    steps_of_term = math.ceil(p.k / t.k)
    units = p.batch * tiles_m * tiles_n * splits
    return Plan(
        tile=t,
        splits=splits,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        group=_group_rows(t, tiles_m, tiles_n, device),
        steps_of_term=steps_of_term,
        steps=steps_of_term * p.terms,
        units=units,
        programs=min(units, device.multiprocessors * t.resident),
        cycles=_predicted(p, t, splits, device),
    )


def _interpreted(p: Problem) -> Plan:
    """Return a plan of few steps, but of several tiles and splits where that is cheap."""
    device = INTERPRETED_DEVICE
    tile = next(
        (t for t in INTERPRETER.tiles if _tiles_of(p, t) * (_steps_of(p, t) + 4) <= 120),
        INTERPRETER.tiles[-1],
    )
    return plan_with(p, tile, min(3, _most_splits(p, tile, device)), device)


def candidates(problem: Problem, device: Device) -> tuple[Plan, ...]:
    """Return plans, the one that is predicted to take the fewest cycles first, one for a tile."""
    if device.capability == 0:
        return (_interpreted(problem),)
    plans = []
    for tile in device.architecture.tiles if problem.vector > 2 else (UNALIGNED,):
        if tile.shared_bytes > device.shared_bytes:
            continue
        most = _most_splits(problem, tile, device)
        counts = {1, most, *(s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if s <= most)}
        of_tile = (plan_with(problem, tile, splits, device) for splits in sorted(counts))
        plans.append(min(of_tile, key=lambda plan: plan.cycles))
    return tuple(sorted(plans, key=lambda plan: plan.cycles))
