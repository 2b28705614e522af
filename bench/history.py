"""Train the regression workload with overflows put in, and keep loss scale and skipped steps.

    python bench/history.py --json FILE [--device cpu] [--steps 200] [--overflows 60 61 130]

appends one line for amp_ext and one for torch.amp, which plot.py draws. A batch with an overflow
has an infinite target, so that every gradient of its step is infinite or NaN.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import environment
import ledger
from ledger import HISTORY
from workloads import regression
from workloads.common import Batch, DeviceParser, positive

SCALER = {"init_scale": 2.0**14, "growth_interval": 25}
PROVIDERS = ("amp_ext", "torch")


class Overflowing:
    """The workload's batches; those whose step (from 1) is listed have infinite targets."""

    def __init__(self, overflows: Sequence[int]) -> None:
        self.overflows = frozenset(overflows)
        self.batches = regression.batches()
        self.count = itertools.count(1)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, targets in self.batches:
            overflows = next(self.count) in self.overflows
            yield inputs, torch.full_like(targets, torch.inf) if overflows else targets


def train(provider: str, device: torch.device, steps: int, overflows: Sequence[int]) -> dict:
    """A training's scale before each step, and the steps (from 1) that were skipped."""
    trainer = regression.training(provider, device, Overflowing(overflows), **SCALER)
    records = list(trainer.steps(steps))
    return {
        "kind": HISTORY,
        "workload": "regression",
        "provider": provider,
        "scales": [record.scale for record in records],
        "skipped": [step for step, record in enumerate(records, 1) if record.skipped],
        "overflows": sorted(overflows),
        "growth_interval": SCALER["growth_interval"],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = DeviceParser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--json", type=Path, metavar="FILE", help="append to it")
    where.add_argument("--results", type=Path, metavar="DIR", help="append to run.py's file in it")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--overflows", type=positive, nargs="*", default=[60, 61, 130])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    torch.set_num_threads(1)  # a small network gains nothing from more
    steps = [step for step in options.overflows if step <= options.steps]
    about = {
        **environment.describe(options.device, shlex.join(["python", "bench/history.py", *argv])),
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    records = [train(name, options.device, options.steps, steps) for name in PROVIDERS]
    file = options.json or ledger.file_for(options.results, about)
    ledger.append(file, [{**record, **about} for record in records])
    for record in records:
        skipped = ", ".join(map(str, record["skipped"])) or "none"
        print(f"{record['provider']}: skipped {skipped}; final scale {record['scales'][-1]:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
