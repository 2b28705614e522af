"""Draw what the ledgers say, one set of figures a machine.

    python bench/figures/plot.py [--results DIR] [--out DIR] [--formats png svg]

Of each machine (a folder of DIR) and case the newest measurement counts. A figure for which lines
are missing is left out, and a sentence says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import evidence

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, default=ROOT / "bench/results", help="ledgers: a folder or a file")
    add("--out", type=Path, default=ROOT / "build/plots")
    add("--formats", nargs="+", choices=("png", "svg"), default=("png", "svg"))
    options = parser.parse_args(argv)
    try:
        from figures import draw
    except ImportError as error:
        print(f"plot: nothing drawn, {error}: pip install matplotlib", file=sys.stderr)
        return 1
    if not options.results.exists():
        print(f"plot: nothing drawn, no ledger at {options.results}", file=sys.stderr)
        return 1
    for machine, runs in evidence.newest(options.results, quick=True).items():
        for kind in draw.FIGURES:
            for suffix in options.formats:
                path = options.out / f"{machine}.{kind}.{suffix}"
                try:
                    draw.write(kind, runs, path)
                except draw.Missing as missing:
                    print(f"{machine}: no {kind}, {missing}")
                    break
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
