"""Time several providers in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.ledger import BENCH_KEYS
from harness.registry import Provider, noted


@dataclass(frozen=True)
class Budget:
    """Limit a measurement: at least `samples` per provider, more while `seconds` are not over."""

    seconds: float  # per provider
    samples: int  # per provider
    sample_us: float  # of launches that make a sample


FULL = {"cpu": Budget(0.4, 11, 50.0), "cuda": Budget(0.3, 25, 2000.0)}
QUICK = {"cpu": Budget(0.05, 5, 20.0), "cuda": Budget(0.1, 5, 500.0)}
WARM_UPS = 3
MAX_SAMPLES = 2000
SLOW_US = 0.2e6  # of a slow sample
SLOW_TURN = 5  # in every so many rounds


class Quantiles(NamedTuple):
    """Hold the time of one launch in microseconds at three percentiles."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Quantiles:
        at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(samples_us, dtype=torch.float64).quantile(at).tolist())


def device_fault() -> str:
    """Return the error that every CUDA call of this process has; empty without one."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch has several types for it
        return str(error).partition("\n")[0]
    return ""


def interleaved(
    providers: Sequence[Provider],
    budget: Budget,
    errors: dict[str, str],
    events: bool = False,
) -> dict[str, Quantiles]:
    """Time the providers in turn, sample by sample, every second round in reverse order.

    A sample is one launch, or as many launches as make up `budget.sample_us` (never more than one
    for a provider with `prepare`). All providers get the same number of samples and of launches. If
    a sample takes over a fifth of a second, its provider sits out four rounds of five. The clock is
    the host's, or a GPU's if `events`.

    Args:
        providers: their launches take no arguments.
        budget: of the samples.
        errors: gains the error of each provider that raises, which is then left out.
        events: whether to use a GPU's clock.
    """
    sample_us = _event_sample_us if events else _host_sample_us

    def able() -> list[Provider]:
        return [provider for provider in providers if provider.name not in errors]

    warm: dict[str, float] = {}
    for count in range(WARM_UPS):  # the last times count: a first launch may compile
        for provider in able():
            if count < 2 or warm[provider.name] <= SLOW_US:
                with noted(errors, provider.name):
                    warm[provider.name] = sample_us(provider, 1)
    launches = 1
    if warm and not any(provider.prepare for provider in providers):
        launches = max(1, math.ceil(budget.sample_us / min(warm.values())))
    slow = {name for name, us in warm.items() if us * launches > SLOW_US}

    samples: dict[str, list[float]] = {provider.name: [] for provider in able()}
    deadline = time.perf_counter() + budget.seconds * len(samples)
    for count in range(MAX_SAMPLES):
        if count >= budget.samples and time.perf_counter() > deadline:
            break
        for provider in able()[:: 1 if count % 2 == 0 else -1]:
            if provider.name in slow and count % SLOW_TURN:
                continue
            with noted(errors, provider.name):
                samples[provider.name].append(sample_us(provider, launches))
    return {name: Quantiles.of(values) for name, values in samples.items() if name not in errors}


def _host_sample_us(provider: Provider, launches: int) -> float:
    with _prepared(provider):
        launch = provider.launch
        start = time.perf_counter_ns()
        for _ in range(launches):
            launch()
        elapsed = time.perf_counter_ns() - start
    excluded = provider.excluded_ns() if provider.excluded_ns else 0
    return (elapsed - excluded) / launches / 1e3


def _event_sample_us(provider: Provider, launches: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _prepared(provider):
        start.record()
        for _ in range(launches):
            provider.launch()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / launches


@contextmanager
def _prepared(provider: Provider) -> Iterator[None]:
    """Enter a provider's context, with its inputs prepared and the GPU idle."""
    with provider.around():
        if provider.prepare:
            provider.prepare()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        yield


def by_triton(provider: Provider) -> dict[str, float | None]:
    """Return a launch's median microseconds by do_bench and by do_bench_cudagraph.

    Both time the provider alone, after the others. A time is None where triton.testing cannot
    measure: with `prepare`, without Triton, and for launches that no graph can capture.
    """
    times: dict[str, float | None] = dict.fromkeys(BENCH_KEYS)
    if provider.prepare:
        return times
    try:
        from triton import testing
    except ImportError:
        return times
    benches = testing.do_bench, testing.do_bench_cudagraph
    for key, bench in zip(BENCH_KEYS, benches, strict=True):
        try:
            with provider.around():
                times[key] = bench(provider.launch, return_mode="median") * 1e3
        except Exception:  # of any type
            torch.cuda.synchronize()
    return times
