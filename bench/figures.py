"""The data of the figures, from ledgers: plain numbers and words, which draw.py makes visible.

Each function takes the runs of one machine and returns a Figure, or a sentence on what it lacks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from evidence import Run, footer
from ledger import FP32_LINE, OURS

LISTS = ("unscale", "cast", "check", "norm")  # ops that read or write lists of tensors


@dataclass(frozen=True)
class Figure:
    """What a figure shows.

    Args:
        kind: a key of draw.DRAW.
        title: with the machine's name.
        footer: lines on machine, versions, commit and command.
        data: of JSON's types.
    """

    kind: str
    title: str
    footer: list[str]
    data: dict

    @property
    def digest(self) -> str:
        """The same for figures that show the same."""
        words = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()


def find(runs: Sequence[Run], op: str) -> Run | None:
    return next((run for run in runs if run.op == op), None)


# ---- roofline ----------------------------------------------------------------------------------


def roofline(runs: Sequence[Run]) -> Figure | str:
    """Matrix products below the copy bandwidth and the product rates measured beside them."""
    gemm = find(runs, "gemm")
    copies = [(r, run) for run in runs for r in run.limits if r["gb_per_s"] and "copy" in r["case"]]
    if not gemm or not copies:
        lacking = "gemm" if not gemm else "an op whose first row is a copy"
        return f"roofline: left out, the ledger has no lines of {lacking}"
    points = [
        {
            "provider": r["provider"],
            "dtype": r["dtype"],
            "case": r["case"],
            "intensity": r["flops"] / r["bytes"],
            "rate": r["gflop_per_s"],
        }
        for r in gemm.measured
        if r["bytes"] and r["gflop_per_s"] and not r["error"] and r["provider"] != FP32_LINE
    ]
    if not points:
        return "roofline: left out, no line of gemm has a product's bytes and its rate"
    copy, source = max(copies, key=lambda pair: pair[0]["gb_per_s"])
    data = {
        "bandwidth": {"rate": copy["gb_per_s"], "name": copy["case"]},
        "roofs": roofs(gemm),
        "points": points,
    }
    name = gemm.device_name
    return Figure("roofline", f"Matrix products on {name}", footer([gemm, source]), data)


def roofs(gemm: Run) -> list[dict]:
    """The fastest product that was not amp_ext's, of each dtype, the table's limits among them."""
    best: dict[str, dict] = {}
    for record in gemm.records:
        if record["provider"] in OURS or not record["gflop_per_s"] or record["error"]:
            continue
        dtype = "fp32" if record["provider"] == FP32_LINE else record["dtype"]
        before = best.get(dtype)
        if before is None or before["gflop_per_s"] < record["gflop_per_s"]:
            best[dtype] = record
    return [
        {"dtype": dtype, "rate": record["gflop_per_s"], "name": record["provider"]}
        for dtype, record in best.items()
    ]


# ---- bandwidth ---------------------------------------------------------------------------------


def bandwidth(runs: Sequence[Run]) -> Figure | str:
    """GB/s over a list's bytes, a panel for each op."""
    ops = [run for op in LISTS if (run := find(runs, op)) and cases_by_size(run)]
    if not ops:
        return "bandwidth: left out, the ledger has no right result of an op on lists of tensors"
    panels = [
        {
            "op": run.op,
            "limits": [
                {"rate": r["gb_per_s"], "name": r["case"]} for r in run.limits if r["gb_per_s"]
            ],
            "cases": cases_by_size(run),
        }
        for run in ops
    ]
    title = f"Bandwidth over the size of a list of tensors, on {ops[0].device_name}"
    return Figure("bandwidth", title, footer(ops), {"panels": panels})


def cases_by_size(run: Run) -> list[dict]:
    cases: dict[str, dict] = {}
    for record in run.measured:
        if record["bytes"] and record["gb_per_s"] and not record["error"]:
            name = record["case"]
            case = cases.setdefault(name, {"case": name, "bytes": record["bytes"], "rates": {}})
            case["rates"][record["provider"]] = record["gb_per_s"]
    return sorted(cases.values(), key=lambda case: case["bytes"])


# ---- steps -------------------------------------------------------------------------------------


def steps(runs: Sequence[Run]) -> Figure | str:
    """Milliseconds of a training step."""
    train = find(runs, "train")
    if not train or not train.measured:
        return "steps: left out, the ledger has no lines of train"
    cases: dict[str, dict[str, list[float]]] = {}
    for record in train.measured:
        if record["p20_us"] and not record["error"]:
            times = [record[key] / 1e3 for key in ("p20_us", "p50_us", "p80_us")]
            cases.setdefault(record["case"], {})[record["provider"]] = times
    if not cases:
        return "steps: left out, the ledger has no right result of train"
    title = f"A training step on {train.device_name}"
    return Figure("steps", title, footer([train]), {"cases": cases})


FIGURES: tuple[Callable[[Sequence[Run]], Figure | str], ...] = (steps, roofline, bandwidth)
