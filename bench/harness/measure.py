"""Measure one case: time its providers and check their results."""

from __future__ import annotations

import gc
from collections.abc import Collection
from datetime import datetime, timezone

from harness import ledger, timing
from harness.registry import NAMES, Case, Op, Provider, Setup, Trial, noted


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
        about: machine, software and commit (ledger.describe).
        only: names of the providers to be timed; all by default.
    """
    gc.collect()  # the large inputs of the last case
    trial = Trial(())
    errors: dict[str, str] = {}
    times: dict[str, timing.Quantiles] = {}
    benches: dict[str, dict[str, float | None]] = {}
    events = setup.on_gpu and not op.host
    with noted(errors, case.baseline):
        trial = case.build()
        wanted = [p for p in trial.providers if case.limit or not only or p.name in only]
        if not wanted:
            names = ", ".join(provider.name for provider in trial.providers)
            raise ValueError(f"--providers: expected some of {names}, got {', '.join(only)}")
        made = ready_providers(trial, wanted, errors)
        times = timing.interleaved(made, budget, errors, events)
        for provider in wanted:
            if provider.name in times and provider.name not in trial.unchecked:
                with noted(errors, provider.name), provider.around():
                    trial.verify(provider)
        if events and budget.seconds >= timing.FULL["cuda"].seconds:  # Triton takes as long
            right = [provider for provider in made if provider.name not in errors]
            benches = {provider.name: timing.by_triton(provider) for provider in right}

    right = times.keys() - errors.keys()
    work, baseline = trial.work, times.get(case.baseline)
    records = []
    for name in dict.fromkeys([*times, *errors]):
        time = times.get(name)
        compared = name != case.baseline and {name, case.baseline} <= right
        records.append(
            {
                "op": op.name,
                "case": case.name,
                "limit": case.limit,
                "dtype": NAMES.get(case.dtype),
                "provider": name,
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
                "ratio": baseline.p20 / time.p20 if compared else None,
                "counted": case.counted,
                "error": errors.get(name),
                **benches.get(name, {}),
                **about,
                "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
        )
    return records


def ready_providers(trial: Trial, wanted: list[Provider], errors: dict[str, str]) -> list[Provider]:
    """Return the providers with launches to be timed, except those that fail."""
    made = []
    for provider in wanted:
        with noted(errors, provider.name), provider.around():
            made.append(trial.timed(provider))
    return made
