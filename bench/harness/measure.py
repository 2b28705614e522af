"""Measure one case: time its providers and check their results."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from datetime import datetime, timezone

from harness import ledger, timing
from harness.registry import NAMES, Case, Op, Setup, Trial, Work, faults


@dataclass
class _Found:
    """What is known of a case so far; `errors` say by provider why it has no ratio."""

    work: Work = field(default_factory=Work)
    times: dict[str, timing.Quantiles] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    foreign_cores: float | None = None


def measure(
    case: Case,
    op: Op,
    setup: Setup,
    budget: timing.Budget,
    about: dict[str, object],
    ours_only: bool = False,
) -> list[ledger.Record]:
    """Time a case's providers and check their results: a line of the ledger for each provider.

    A provider that cannot run, or whose result is wrong, has an error and no ratio; the others
    keep theirs. Where the case cannot be built, its baseline has the error.

    Args:
        case: of `op`.
        op: says which clock.
        setup: as given to the op's cases.
        budget: how long to measure.
        about: machine, software and commit (environment.describe).
        ours_only: leave all providers out but amp_ext's; then there are no ratios.
    """
    found = _Found()

    def run() -> None:
        _measure(found, case.build(), setup, budget, setup.on_gpu and not op.host, ours_only)

    found.errors.update(faults({case.baseline: run}))
    gc.collect()  # of the inputs, which are large
    return [
        _record(found, case, op, provider, about)
        for provider in dict.fromkeys([*found.times, *found.errors])
    ]


def _measure(
    found: _Found,
    trial: Trial,
    setup: Setup,
    budget: timing.Budget,
    events: bool,
    ours_only: bool,
) -> None:
    found.work = trial.work
    asked = [p for p in trial.providers if p.name in ledger.OURS] if ours_only else []
    asked = asked or trial.providers
    if not setup.on_gpu:
        found.foreign_cores = timing.foreign_load(wait=0.0 if setup.quick else 0.5)
    while able := [provider for provider in asked if provider.name not in found.errors]:
        try:
            found.times = timing.interleaved(able, budget, events)
            break
        except timing.Failed as failure:
            found.errors[failure.name] = failure.why
    if found.times:
        found.errors.update(trial.verify(found.times.keys()))


def _record(
    found: _Found, case: Case, op: Op, provider: str, about: dict[str, object]
) -> ledger.Record:
    time, work = found.times.get(provider), found.work
    ratio = None
    right = found.times.keys() - found.errors.keys()
    if provider != case.baseline and {provider, case.baseline} <= right:
        ratio = found.times[case.baseline].p20 / time.p20
    return {
        "op": op.name,
        "case": case.name,
        "limit": case.limit,
        "dtype": NAMES.get(case.dtype),
        "provider": provider,
        "baseline": case.baseline,
        "p20_us": time and time.p20,
        "p50_us": time and time.p50,
        "p80_us": time and time.p80,
        "bytes": work.bytes or None,
        "gb_per_s": work.bytes / time.p20 / 1e3 if work.bytes and time else None,
        "flops": work.flops or None,
        "gflop_per_s": work.flops / time.p20 / 1e3 if work.flops and time else None,
        "parameters": work.parameters or None,
        "calls": work.calls,
        "ratio": ratio,
        "counted": case.counted,
        "error": found.errors.get(provider),
        "foreign_cores": found.foreign_cores,
        **about,
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
