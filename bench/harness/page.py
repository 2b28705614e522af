"""Make the results of docs/measuring.md from the ledgers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from harness import evidence
from harness.evidence import Run
from harness.table import ratio_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/measuring.md"
BEGIN = "<!-- results: written by `make figures`, not by hand -->"
END = "<!-- end of results -->"
PLOTS = "bench/results/plots"
NO_GPU = "GPU: not yet measured."
COLUMNS = ("op", "backend", "ratio to", "cases", "geometric mean", "worst", "best")
FIGURES = {  # the committed figures: the op that each needs, and its words
    "steps": ("train", "milliseconds of a training step in FP16, and of torch in FP32"),
    "roofline": ("gemm", "GFLOP/s of matrix products over their arithmetic intensity"),
}


def section(results: Path) -> str:
    """Return the text between the two comments."""
    machines = evidence.newest(results)
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
        lines += [f"### {'GPU' if runs[0].on_gpu else 'CPU'}: {runs[0].device_name}", ""]
        rows = [COLUMNS, ["---"] * len(COLUMNS), *(row for run in runs for row in table(run))]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
        ops: dict[str, list[str]] = {}
        for run in runs:
            for source in run.sources:
                ops.setdefault(source, []).append(run.op)
        lines += [*(f"- {', '.join(names)}: {source}" for source, names in ops.items()), ""]
    for kind, file, _ in figures(results):
        lines.append(f"![{FIGURES[kind][1]}](../{PLOTS}/{file})")
    return "\n".join([*lines, ""])


def table(run: Run) -> Iterator[Sequence[str]]:
    """Yield a row for each of amp_ext's providers, and for a baseline that has failed."""
    for provider in dict.fromkeys([*run.ratios, *run.refused]):
        ratios, refused = run.ratios.get(provider, {}), run.refused.get(provider)
        cases = f"{len(ratios)}, {len(refused)} failed" if refused else str(len(ratios))
        if not ratios:
            yield run.op, provider, "", cases, "", "", ""
            continue
        to = ", ".join(run.baselines(provider))
        yield run.op, provider, to, cases, *summary(ratios)
        if fp32 := run.against_fp32(provider):
            yield run.op, provider, "torch, FP32", str(len(fp32)), *summary(fp32)


def summary(ratios: dict[str, float]) -> tuple[str, str, str]:
    """Return the geometric mean, the worst and the best ratio, with the names of their cases."""
    ends = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    texts = (f"{ratio_text(ratios[case])} ({case})" for case in ends)
    return ratio_text(geometric_mean(ratios.values())), *texts


def figures(results: Path) -> Iterator[tuple[str, str, list[Run]]]:
    """Yield kind, file and runs of each figure, of the first machine that has its op."""
    for kind, (op, _) in FIGURES.items():
        for machine, runs in evidence.newest(results).items():
            if any(run.op == op and run.measured for run in runs):
                yield kind, f"{machine}.{kind}.svg", runs
                break


def replaced(text: str, new: str, first: str = BEGIN, last: str = END) -> str:
    """Replace the text between two comments of the page, or raise ValueError without them."""
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {first} or, below it, {last}")
    return f"{before}{first}\n{new}\n{last}{after}"
