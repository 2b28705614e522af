"""Measure one case: time its providers and check their results."""

from __future__ import annotations

import gc
from collections.abc import Collection
from datetime import datetime, timezone

from harness import ledger, timing
from harness.registry import NAMES, Case, Op, Setup, Work, faults


class _Found:
    """Collect the results of a case; `errors` hold the reasons for missing ratios."""

    def __init__(self) -> None:
        self.work = Work()
        self.times: dict[str, timing.Quantiles] = {}
        self.benches: dict[str, dict[str, float]] = {}
        self.errors: dict[str, str] = {}
        self.foreign_cores: float | None = None


def measure(
    case: Case,
    op: Op,
    setup: Setup,
    budget: timing.Budget,
    about: dict[str, object],
    only: Collection[str] = (),
) -> list[ledger.Record]:
    """Time a case's providers and check their results; return a record for each provider.

    A provider that cannot run, or has a wrong result, gets an error and no ratio. The others keep
    theirs. The baseline has the error of a case that cannot be built.

    Args:
        case: of `op`.
        op: defines the clock.
        setup: as given to the op's cases.
        budget: of the samples.
        about: machine, software and commit (environment.describe).
        only: names of the providers to be timed; all by default.
    """
    found = _Found()
    found.errors.update(
        faults({case.baseline: lambda: _fill(found, case, op, setup, budget, only)})
    )
    gc.collect()  # of the large inputs
    names = dict.fromkeys([*found.times, *found.errors])
    return [_record(found, case, op, name, about) for name in names]


def _fill(
    found: _Found, case: Case, op: Op, setup: Setup, budget: timing.Budget, only: Collection[str]
) -> None:
    trial = case.build()
    found.work = trial.work
    events = setup.on_gpu and not op.host
    wanted = [p for p in trial.providers if case.limit or not only or p.name in only]
    if not wanted:
        names = ", ".join(provider.name for provider in trial.providers)
        raise ValueError(f"--providers: expected some of {names}, got {', '.join(only)}")
    if not setup.on_gpu:
        found.foreign_cores = timing.foreign_load(wait=0.0 if setup.quick else 0.5)
    while able := [provider for provider in wanted if provider.name not in found.errors]:
        try:
            found.times = timing.interleaved(able, budget, events)
            break
        except timing.Failed as failure:
            found.errors[failure.name] = failure.why
    if found.times:
        found.errors.update(trial.verify(found.times.keys()))
    if events and budget.seconds >= timing.FULL["cuda"].seconds:  # Triton takes as long
        right = [provider for provider in able if provider.name not in found.errors]
        found.benches = {provider.name: timing.by_triton(provider) for provider in right}


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
        **found.benches.get(provider, {}),
        **about,
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
