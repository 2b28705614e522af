"""Time every plan of the CUDA gemm for Hopper on workloads/gemm_shapes.py's products.

    python bench/gpu/tune_gemm.py    # prints entries for csrc/include/amp_ext/gemm_measured.h
    python bench/gpu/tune_gemm.py --filter wgrad

Each plan is timed beside the planner's own; an entry is printed where one is faster by more than
the noise. Plans with a wrong result are named on stderr, and the exit status is 1. Needs a GPU of
compute capability 9.0.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from amp_ext import _C
from harness import providers
from harness.lists import rotated
from harness.providers import Line
from harness.registry import Provider
from harness.timing import Budget, interleaved
from ops.gemm import Operands, ours, turns, verify
from workloads.gemm_shapes import Shape, planned_products

BUDGET = Budget(seconds=0.02, samples=9, sample_us=500.0)
NOISE = 1.01
PLANNED = "planner"


class Candidate(NamedTuple):
    """A plan: the number of its tile, its cluster, splits of the last round's tiles, group."""

    tile: int
    cluster: tuple[int, int]
    splits: int
    group: int

    def words(self) -> str:
        return "{:d} {} {:d} {:d}".format(self.tile, "x".join(map(str, self.cluster)), *self[2:])


def tile_names() -> list[str]:
    """The initialiser of each tile: m, n, ping_pong."""
    names = []
    for text in _C.gemm_tiles()["gemm_sm90_kernel"]:
        m, n, _ = text.split(",")[0].removeprefix("sm90 tile ").split("x")
        names.append(f"{{{m}, {n}, {'true' if 'ping-pong' in text else 'false'}}}")
    return names


def candidates(shape: Shape) -> Iterator[Candidate]:
    """All tiles and clusters, with splits where a product has few tiles."""
    few = shape.m * shape.n <= 132 * 256 * 128
    splits = [n for n in (1, 2, 3, 4, 6, 8, 16) if n == 1 or (few and shape.k >= n * 512)]
    tiles = range(len(tile_names()))
    for tile, cluster, count in itertools.product(tiles, ((1, 1), (2, 1), (1, 2)), splits):
        yield Candidate(tile, cluster, count, 0)


@contextmanager
def forced(plan: Candidate | None) -> Iterator[None]:
    """Products by the CUDA kernels and by a plan, or by the planner's."""
    with providers.ours(torch.device("cuda"))["cuda"]():
        _C.force_gemm_plan(*(plan or (None,)))
        try:
            yield
        finally:
            _C.force_gemm_plan(None)


def entry(shape: Shape, plan: Candidate) -> str:
    """A line of kMeasuredPlans."""
    majors = ("mn" if shape.layout[0] == "T" else "k", "k" if shape.layout[1] == "T" else "mn")
    size = 4 if shape.out == torch.float32 else 2
    choice = f"{tile_names()[plan.tile]}, {plan.cluster[0]}, {plan.cluster[1]}"
    return (
        f"{{{shape.m}, {shape.n}, {shape.k}, Major::{majors[0]}, Major::{majors[1]}, {size}, "
        f"false, {choice}, {plan.splits}, {plan.group}}},"
    )


class Tuned(NamedTuple):
    """An entry where a plan beats the planner's, and what is wrong with results, by plan."""

    entry: str | None
    wrong: dict[str, str]


def tune(shape: Shape) -> Tuned:
    """Time all plans of one product, but for those with a wrong result."""
    device = torch.device("cuda")
    given = Operands.of(shape, torch.float16, device)
    plans: dict[str, Candidate | None] = {PLANNED: None}
    plans |= {plan.words(): plan for plan in candidates(shape)}
    lines = {name: Line(ours, partial(forced, plan)) for name, plan in plans.items()}
    wrong = verify(shape, given, lines)
    for name, fault in wrong.items():
        print(f"{shape.name} {shape.layout}, {name}: {fault}", file=sys.stderr)
    if PLANNED in wrong:
        return Tuned(None, wrong)
    sets = rotated(given, given.bytes, Operands.clone, device)
    timed = [
        Provider(name, turns(line.launch, shape, sets), around=line.around)
        for name, line in lines.items()
        if name not in wrong
    ]
    times = {n: q.p20 for n, q in interleaved(timed, BUDGET, events=True).items()}
    best = min(times, key=times.__getitem__)
    tflops = {name: shape.flops / us / 1e6 for name, us in times.items()}
    print(
        f"// {shape.name} {shape.layout}: {tflops[best]:.0f} TFLOP/s by {best}, "
        f"{tflops[PLANNED]:.0f} by the planner's",
        flush=True,
    )
    plan = plans[best]
    faster = plan and times[PLANNED] > NOISE * times[best]
    return Tuned(entry(shape, plan) if faster else None, wrong)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="", help="only products whose name has this in it")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("tune_gemm: needs a GPU of compute capability 9.0", file=sys.stderr)
        return 1
    print(f"// {torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = [
        tune(shape)
        for shape in planned_products()
        if options.filter in f"{shape.name} {shape.layout}"
    ]
    print(*(tuned.entry for tuned in found if tuned.entry), sep="\n")
    return int(any(tuned.wrong for tuned in found))


if __name__ == "__main__":
    sys.exit(main())
