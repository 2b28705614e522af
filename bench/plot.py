"""Draw what the ledgers say, one set of figures a machine.

    python bench/plot.py [--results DIR] [--out DIR] [--formats png svg]

Of each machine (a folder of DIR) and case the newest measurement counts. A figure for which lines
are missing is left out, and a sentence says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import evidence
from figures import FIGURES, Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


def collect(results: Path, quick: bool) -> Iterator[tuple[str, Figure | str]]:
    """Machines, GPUs first, each with its figures or why it lacks them."""
    for machine, runs in evidence.machines(evidence.newest(results, quick)).items():
        for make in FIGURES:
            yield machine, make(runs)


def file_name(machine: str, figure: Figure) -> str:
    return f"{machine}.{figure.kind}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="ledgers: a folder or a file")
    parser.add_argument("--out", type=Path, default=ROOT / "build/plots")
    parser.add_argument("--formats", nargs="+", choices=("png", "svg"), default=("png", "svg"))
    options = parser.parse_args(argv)
    try:
        import draw
    except ImportError as error:
        print(f"plot: nothing drawn, {error}: pip install matplotlib", file=sys.stderr)
        return 1
    if not options.results.exists():
        print(f"plot: nothing drawn, no ledger at {options.results}", file=sys.stderr)
        return 1
    for machine, figure in collect(options.results, quick=True):
        if isinstance(figure, str):
            print(f"{machine}: {figure}")
            continue
        for suffix in options.formats:
            path = options.out / f"{file_name(machine, figure)}.{suffix}"
            draw.write(figure, path)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
