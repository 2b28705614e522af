"""Write README's performance section and its figures, from the ledgers alone.

    python bench/readme.py

The section lies between two comments; the figures, SVG, in bench/results/plots, beside what they
are drawn from. A figure is drawn again only if what it shows has changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import evidence
import plot
from evidence import Ratios, Run, Source, ratio_text
from figures import Figure

ROOT = plot.ROOT
BEGIN = "<!-- performance: written by `make readme`, not by hand -->"
END = "<!-- end of performance -->"
PLOTS = "bench/results/plots"
NO_GPU = "GPU: not yet measured."
COLUMNS = ("op", "line", "ratio to", "cases", "geometric mean", "worst", "best")
FIGURES = {  # those that are committed, by kind, and what they show in words
    "steps": "milliseconds of a training step",
    "roofline": "GFLOP/s of matrix products over their arithmetic intensity",
}


def section(results: Path) -> str:
    """All that stands between the two comments."""
    machines = evidence.machines(evidence.newest(results))
    lines = [
        "A ratio is the other's time over amp_ext's, both at the 20th percentile and measured in",
        "turn in one run: above 1 amp_ext is faster. A line is a backend of amp_ext; what gave a",
        "wrong result has no ratio. Of each machine and case the newest measurement stands.",
        "",
    ]
    if not any(run.device == "cuda" for runs in machines.values() for run in runs):
        lines += [NO_GPU, ""]
    for runs in machines.values():
        lines += [*machine_lines(runs), ""]
    for file, figure in figures(results).items():
        lines.append(f"![{FIGURES[figure.kind]}]({PLOTS}/{file})")
    return "\n".join([*lines, ""])


def machine_lines(runs: Sequence[Run]) -> Iterator[str]:
    kind = "GPU" if runs[0].device == "cuda" else "CPU"
    yield f"### {kind}: {runs[0].device_name}"
    yield ""
    yield from (row(COLUMNS), row(["---"] * len(COLUMNS)))
    for run in runs:
        yield from map(row, table(run))
    yield ""
    ops: dict[Source, list[str]] = {}
    for run in runs:
        for source in run.sources:
            ops.setdefault(source, []).append(run.op)
    for source, names in ops.items():
        yield f"- {', '.join(names)}: {source.versions}, {source.date}, `{source.command}`"


def table(run: Run) -> Iterator[Sequence[str]]:
    """A row for each of amp_ext's providers, and for a baseline that has failed."""
    for provider in dict.fromkeys([*run.ratios, *run.refused]):
        ratios, refused = run.ratios.get(provider), run.refused.get(provider)
        cases = str(len(ratios.cases) if ratios else 0)
        if refused:
            cases += f", {len(refused)} refused"
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


def figures(results: Path) -> dict[str, Figure]:
    """Those of the first machine, a GPU if there is one, by the names of their files."""
    drawn = [pair for pair in plot.collect(results, quick=False) if isinstance(pair[1], Figure)]
    return {
        f"{plot.file_name(machine, figure)}.svg": figure
        for machine, figure in drawn
        if machine == drawn[0][0] and figure.kind in FIGURES
    }


def replaced(text: str, new: str) -> str:
    """The README with another section; ValueError where the comments are not there, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks {BEGIN} or, below it, {END}")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def drawn_digest(path: Path) -> str | None:
    """The digest of what a figure's file shows; None where there is no such file."""
    if not path.exists():
        return None
    return path.read_text().partition(">data ")[2].partition("<")[0].strip()


def stale(results: Path, plots: Path) -> tuple[list[tuple[Path, Figure]], list[Path]]:
    """Figures whose file does not show them, and files that belong to no figure."""
    wanted = {plots / file: figure for file, figure in figures(results).items()}
    changed = [(path, f) for path, f in wanted.items() if drawn_digest(path) != f.digest]
    return changed, sorted(set(plots.glob("*.svg")) - wanted.keys())


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = replaced(before, section(plot.RESULTS))
    changed, leftover = stale(plot.RESULTS, ROOT / PLOTS)
    if before != after:
        readme.write_text(after)
        print(f"wrote {readme}")
    if changed:
        import draw  # which needs matplotlib
    for path, figure in changed:
        draw.write(figure, path)
        print(f"wrote {path}")
    for path in leftover:
        path.unlink()
        print(f"removed {path}")


if __name__ == "__main__":
    main()
