"""Compare measurements with those of a ledger: which of amp_ext's became slower?"""

from __future__ import annotations

from collections.abc import Iterable

import ledger
from table import microseconds

ROW = "{:<12}{:<40}{:<8}{:>10}{:>10}{:>7}{:>13}"
Key = tuple[object, ...]


def key(record: dict) -> Key:
    """What may be compared: a provider's case, of the same size, on a kind of machine."""
    size = (record[name] for name in ("bytes", "flops", "parameters", "calls"))
    threads = record["threads"] if record["device"] == "cpu" else None
    where = record["device_name"], threads
    return record["op"], record["case"], record["provider"], *size, *where


def is_slower(now: dict, before: dict) -> bool:
    """By more than the wider of the two measurements' spreads, from p20 to p80."""
    noise = max(record["p80_us"] - record["p20_us"] for record in (now, before))
    return now["p20_us"] - before["p20_us"] > noise


def against(measured: Iterable[dict], earlier: Iterable[dict]) -> tuple[list[str], int]:
    """Which of amp_ext's cases became slower.

    Args:
        measured: a run's records.
        earlier: a ledger's; of a case measured several times the last one counts. Records of wrong
            results are left out on both sides.

    Returns:
        Lines to print, and the exit status: 1 where a case became slower, 2 where the ledger has
        none of the cases on this machine (on a CPU with as many threads).
    """
    before = {key(record): record for record in earlier if not record["error"]}
    right = (record for record in measured if not record["error"])
    pairs = [(now, before[key(now)]) for now in right if key(now) in before]
    mine = [(now, then) for now, then in pairs if now["provider"] in ledger.OURS]
    if not mine:
        return ["the ledger has none of these cases, measured on this machine"], 2
    others = {
        (now["op"], now["case"]): then["p20_us"] / now["p20_us"]
        for now, then in pairs
        if now["provider"] == now["baseline"]
    }
    lines = [ROW.format("", "", "", "before us", "now us", "ratio", "baseline's")]
    slower = [(now, then) for now, then in mine if is_slower(now, then)]
    for now, then in slower:
        other = others.get((now["op"], now["case"]))
        lines.append(
            ROW.format(
                now["op"],
                now["case"],
                now["provider"],
                microseconds(then["p20_us"]),
                microseconds(now["p20_us"]),
                f"{then['p20_us'] / now['p20_us']:.2f}",
                f"{other:.2f}" if other else "",
            ).rstrip()
        )
    lines.append(f"{len(slower)} of {len(mine)} measurements became slower than noise")
    return (lines if slower else lines[-1:]), int(bool(slower))
