"""bench/timing.py: who is timed when, and what is made of it."""

from __future__ import annotations

import contextlib

from harness import registry
from harness import timing
from bench_program import BENCH, quiet  # noqa: F401  (a fixture)


def test_quantiles_are_of_the_samples():
    quantiles = timing.Quantiles.of([float(i) for i in range(101)])
    assert (quantiles.p20, quantiles.p50, quantiles.p80) == (20.0, 50.0, 80.0)


def test_providers_take_turns_and_excluded_time_is_subtracted(monkeypatch):
    calls: list[str] = []
    clock = iter(range(0, 10**9, 5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))

    @contextlib.contextmanager
    def around():
        calls.append("enter b")
        yield
        calls.append("leave b")

    providers = [
        registry.Provider("a", lambda: calls.append("a"), lambda: calls.append("prepare a")),
        registry.Provider("b", lambda: calls.append("b"), excluded_ns=lambda: 2000, around=around),
    ]
    budget = timing.Budget(seconds=0.0, samples=4, sample_us=1.0)
    times = timing.interleaved(providers, budget)
    assert times["a"].p50 == 5.0
    assert times["b"].p50 == 3.0
    a, b = ["prepare a", "a"], ["enter b", "b", "leave b"]
    assert calls[-20:] == 2 * (a + b + b + a)


def test_a_slow_provider_sits_rounds_out(monkeypatch):
    now = 0

    def takes(us: float):
        def launch() -> None:
            nonlocal now
            now += int(us * 1e3)
            calls.append(us)

        return launch

    calls: list[float] = []
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now)
    providers = [registry.Provider(str(us), takes(us)) for us in (100.0, 150e3, 600e3)]
    budget = timing.Budget(seconds=0.0, samples=25, sample_us=1.0)
    times = timing.interleaved(providers, budget)
    assert [times[str(us)].p50 for us in (100.0, 150e3, 600e3)] == [100.0, 150e3, 600e3]
    warm_up = 3  # rounds, of which a slow one takes part in the first
    assert [calls.count(us) for us in (100.0, 150e3, 600e3)] == [warm_up + 25, warm_up + 25, 1 + 5]
