"""Interleaved timing of several providers, and a look at the machine's load before it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.registry import Provider, described

FOREIGN_CORES = 0.5


@dataclass(frozen=True)
class Budget:
    """How long to measure: at least `samples` per provider, more while `seconds` are not over.

    Args:
        seconds: per provider.
        samples: per provider.
        sample_us: microseconds of launches that make a sample.
    """

    seconds: float
    samples: int
    sample_us: float


FULL = {"cpu": Budget(0.4, 11, 50.0), "cuda": Budget(0.3, 25, 2000.0)}
QUICK = {"cpu": Budget(0.05, 5, 20.0), "cuda": Budget(0.1, 5, 500.0)}
WARM_UPS = 3
MAX_SAMPLES = 2000
SLOW_US = 0.2e6  # a sample that takes so long is taken
SLOW_TURN = 5  # in every so many rounds


@dataclass(frozen=True)
class Quantiles:
    """Time of one launch in microseconds at the 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Quantiles:
        at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(samples_us, dtype=torch.float64).quantile(at).tolist())


class Failed(Exception):
    """A provider could not be timed; its name and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def device_fault() -> str:
    """Why the GPU cannot be used any more by this process, if it cannot."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch has several types for it
        return str(error).partition("\n")[0]
    return ""


def interleaved(
    providers: Sequence[Provider], budget: Budget, events: bool = False
) -> dict[str, Quantiles]:
    """Time the providers in turn, sample by sample, every second round in reverse order.

    A sample is one launch, or as many launches as make up `budget.sample_us` (never more than one
    when a provider has `prepare`). All providers get the same number of samples and of launches,
    but for those whose sample takes over a fifth of a second: they sit out four rounds of five.
    The clock is the host's, or a GPU's if `events`.

    Raises:
        Failed: a provider has raised.
    """

    def sample(provider: Provider, launches: int) -> float:
        try:
            return (_event_sample_us if events else _host_sample_us)(provider, launches)
        except Exception as error:
            raise Failed(provider.name, described(error)) from error

    warm: dict[str, float] = {}
    for _ in range(WARM_UPS):  # the last one's times count; a slow provider needs one alone
        for provider in providers:
            if warm.get(provider.name, 0.0) <= SLOW_US:
                warm[provider.name] = sample(provider, 1)
    launches = 1
    if not any(provider.prepare for provider in providers):
        launches = max(1, math.ceil(budget.sample_us / min(warm.values())))
    slow = {name for name, us in warm.items() if us * launches > SLOW_US}

    samples: dict[str, list[float]] = {provider.name: [] for provider in providers}
    deadline = time.perf_counter() + budget.seconds * len(providers)
    for count in range(MAX_SAMPLES):
        if count >= budget.samples and time.perf_counter() > deadline:
            break
        for provider in providers if count % 2 == 0 else reversed(providers):
            if provider.name in slow and count % SLOW_TURN:
                continue
            samples[provider.name].append(sample(provider, launches))
    return {name: Quantiles.of(values) for name, values in samples.items()}


def _host_sample_us(provider: Provider, launches: int) -> float:
    with provider.around():
        if provider.prepare:
            provider.prepare()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        launch = provider.launch
        start = time.perf_counter_ns()
        for _ in range(launches):
            launch()
        elapsed = time.perf_counter_ns() - start
    excluded = provider.excluded_ns() if provider.excluded_ns else 0
    return (elapsed - excluded) / launches / 1e3


def _event_sample_us(provider: Provider, launches: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with provider.around():
        if provider.prepare:
            provider.prepare()
        torch.cuda.synchronize()
        start.record()
        for _ in range(launches):
            provider.launch()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / launches


def busy_cores(seconds: float = 0.1) -> float | None:
    """Cores that others keep busy while this process sleeps; None where /proc/stat is missing."""
    before = _cpu_ticks()
    time.sleep(seconds)
    after = _cpu_ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    idle, total = after[0] - before[0], after[1] - before[1]
    return (1 - idle / total) * (os.cpu_count() or 1)


def _cpu_ticks() -> tuple[int, int] | None:
    """(idle, total) clock ticks of all cores since boot; see proc_stat(5)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    ticks = [int(field) for field in fields]
    return ticks[3] + ticks[4], sum(ticks)


def foreign_load(wait: float) -> float:
    """Cores held by other processes, looked at again `wait` seconds later if above half a core."""
    load = busy_cores() or 0.0
    if load > FOREIGN_CORES:
        time.sleep(wait)
        load = busy_cores() or 0.0
    return load
