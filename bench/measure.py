"""Measure one case: time its providers and check their results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial

import ledger
import timing
from registry import NAMES, Case, Op, Setup, Trial, Work, faults


@dataclass
class Outcome:
    """A measured case.

    Args:
        case: that was measured.
        work: of one launch.
        times: by provider; of those that ran.
        errors: by provider: why it has no ratio. Where the case could not be built, its baseline's.
        foreign_cores: held by other processes before.
    """

    case: Case
    work: Work = field(default_factory=Work)
    times: dict[str, timing.Quantiles] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    foreign_cores: float | None = None

    def ratio(self, provider: str) -> float | None:
        """The baseline's time over the provider's at p20; above 1 the provider is faster."""
        baseline = self.case.baseline
        right = self.times.keys() - self.errors.keys()
        if provider == baseline or not {provider, baseline} <= right:
            return None
        return self.times[baseline].p20 / self.times[provider].p20

    def records(self, op: Op, environment: dict[str, object]) -> Iterator[dict]:
        """A line of the ledger for each provider."""
        for provider in dict.fromkeys([*self.times, *self.errors]):
            time = self.times.get(provider)
            rate = {unit: time and self.work.rate(unit, time.p20) for unit in ("GB/s", "GFLOP/s")}
            yield {
                "op": op.name,
                "case": self.case.name,
                "limit": self.case.limit,
                "dtype": NAMES.get(self.case.dtype),
                "provider": provider,
                "baseline": self.case.baseline,
                "p20_us": time and time.p20,
                "p50_us": time and time.p50,
                "p80_us": time and time.p80,
                "bytes": self.work.bytes or None,
                "gb_per_s": rate["GB/s"] or None,
                "flops": self.work.flops or None,
                "gflop_per_s": rate["GFLOP/s"] or None,
                "parameters": self.work.parameters or None,
                "calls": self.work.calls,
                "ratio": self.ratio(provider),
                "counted": self.case.counted,
                "error": self.errors.get(provider),
                "foreign_cores": self.foreign_cores,
                **environment,
                "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }


def measure(case: Case, op: Op, setup: Setup, budget: timing.Budget, ours_only: bool) -> Outcome:
    """Time a case's providers and check their results, whatever goes wrong with it.

    A provider that cannot run, or whose result is wrong, has an error and no ratio; the others
    keep theirs.

    Args:
        case: of `op`.
        op: says which clock.
        setup: as given to the op's cases.
        budget: how long to measure.
        ours_only: leave all providers out but amp_ext's; then there are no ratios.
    """
    outcome = Outcome(case)
    run = partial(_measure, outcome, op, setup, budget, ours_only)
    outcome.errors.update(faults({case.baseline: run}))
    gc.collect()  # of the inputs, which are large
    return outcome


def _measure(
    outcome: Outcome, op: Op, setup: Setup, budget: timing.Budget, ours_only: bool
) -> None:
    trial: Trial = outcome.case.build()
    outcome.work = trial.work
    asked = [p for p in trial.providers if p.name in ledger.OURS] if ours_only else []
    asked = asked or trial.providers
    if not setup.on_gpu:
        outcome.foreign_cores = timing.foreign_load(wait=0.0 if setup.quick else 0.5)
    outcome.errors.update(faults({p.name: partial(timing.launch_once, p) for p in asked}))
    while able := [provider for provider in asked if provider.name not in outcome.errors]:
        try:
            outcome.times = timing.interleaved(able, budget, setup.on_gpu and not op.host)
            break
        except timing.Failed as failure:
            outcome.errors[failure.name] = failure.why
    if outcome.times:
        outcome.errors.update(trial.verify(outcome.times.keys()))
