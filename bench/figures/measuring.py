"""Write the results in docs/measuring.md and their figures, from the ledgers alone.

    python bench/figures/measuring.py

The results lie between two comments; the figures, SVG, in bench/results/plots, beside what they are
drawn from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.evidence import Ratios, Run, newest, ratio_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/measuring.md"
BEGIN = "<!-- results: written by `make figures`, not by hand -->"
END = "<!-- end of results -->"
PLOTS = "bench/results/plots"
NO_GPU = "GPU: not yet measured."
COLUMNS = ("op", "backend", "ratio to", "cases", "geometric mean", "worst", "best")
FIGURES = {  # those that are committed, what they need, and what they show in words
    "steps": ("train", "milliseconds of a training step in FP16, and of torch in FP32"),
    "roofline": ("gemm", "GFLOP/s of matrix products over their arithmetic intensity"),
}


def section(results: Path) -> str:
    """All that stands between the two comments."""
    machines = newest(results)
    lines = [
        "A ratio is the time of torch over that of amp_ext, both at the 20th percentile and",
        "measured in turn in one run: above 1 amp_ext is faster. A wrong result has no ratio. Each",
        "case is shown as it was last measured. A ratio to torch in FP32 compares 16-bit amp_ext",
        "with torch without mixed precision.",
        "",
    ]
    if not any(run.on_gpu for runs in machines.values() for run in runs):
        lines += [NO_GPU, ""]
    for runs in machines.values():
        lines += [*machine_lines(runs), ""]
    for kind, file, _ in figures(results):
        lines.append(f"![{FIGURES[kind][1]}](../{PLOTS}/{file})")
    return "\n".join([*lines, ""])


def machine_lines(runs: Sequence[Run]) -> Iterator[str]:
    yield f"### {'GPU' if runs[0].on_gpu else 'CPU'}: {runs[0].device_name}"
    yield ""
    yield from (row(COLUMNS), row(["---"] * len(COLUMNS)))
    for run in runs:
        yield from map(row, table(run))
    yield ""
    ops: dict[str, list[str]] = {}
    for run in runs:
        for source in run.sources:
            ops.setdefault(source, []).append(run.op)
    for source, names in ops.items():
        yield f"- {', '.join(names)}: {source}"


def table(run: Run) -> Iterator[Sequence[str]]:
    """A row for each of amp_ext's providers, and for a baseline that has failed."""
    for provider in dict.fromkeys([*run.ratios, *run.refused]):
        ratios, refused = run.ratios.get(provider), run.refused.get(provider)
        cases = str(len(ratios.cases) if ratios else 0)
        if refused:
            cases += f", {len(refused)} failed"
        if ratios is None:
            yield run.op, provider, "", cases, "", "", ""
            continue
        to = ", ".join(run.baselines(provider))
        yield run.op, provider, to, cases, *ratio_cells(ratios)
        if fp32 := run.against_fp32(provider):
            yield run.op, provider, "torch, FP32", str(len(fp32.cases)), *ratio_cells(fp32)


def ratio_cells(ratios: Ratios) -> tuple[str, str, str]:
    """Mean, worst and best."""
    ends = (f"{ratio_text(ratios.cases[c])} ({c})" for c in (ratios.worst, ratios.best))
    return ratio_text(ratios.mean), *ends


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figures(results: Path) -> Iterator[tuple[str, str, list[Run]]]:
    """Kind, file and runs of the first machine's figures, a GPU's if there is one."""
    for machine, runs in list(newest(results).items())[:1]:
        for kind, (op, _) in FIGURES.items():
            if any(run.op == op for run in runs):
                yield kind, f"{machine}.{kind}.svg", runs


def replaced(text: str, new: str, first: str = BEGIN, last: str = END) -> str:
    """The page with other text between two comments; ValueError where these are not there, in
    order."""
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {first} or, below it, {last}")
    return f"{before}{first}\n{new}\n{last}{after}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    from figures import draw  # which needs matplotlib

    PAGE.write_text(replaced(PAGE.read_text(), section(RESULTS)))
    leftover = set((ROOT / PLOTS).glob("*.svg"))
    for kind, file, runs in figures(RESULTS):
        path = ROOT / PLOTS / file
        draw.write(kind, runs, path)
        leftover.discard(path)
    for path in leftover:
        path.unlink()


if __name__ == "__main__":
    main()
