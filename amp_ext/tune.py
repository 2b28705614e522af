"""Which backend computes which product, by measurement: ``amp_ext.tune()``, and ``python -m amp_ext
tune SCRIPT``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import runpy
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from amp_ext import _table
from amp_ext._library import _C
from amp_ext._triton import is_interpreted, why_not_triton

Way = tuple[str, int]
"""A backend, and which of its ways to compute a product."""

LEAST_ROUNDS, ENOUGH_ROUNDS = 3, 100
CALM = 1.1
"""Rounds are enough while medians are not above the 20th percentiles by more."""
SAMPLE = {"cpu": 2e-5, "cuda": 1e-3}
"""Seconds that a sample takes at least: as many launches as make them up."""
GAIN = 1.03
"""What is faster by less is not told from noise: the default stays."""
IN_PASSING = 2.0
"""Seconds a process that AMP_EXT_GEMM=measure may take."""


class Tuned(NamedTuple):
    """A product that was measured.

    Attributes:
        product: in words.
        calls: how often it was computed in the region.
        backend: what computes it from now on.
        variant: which of the backend's ways.
        before: its seconds, 20th percentile, by the default, without a table.
        after: those by the backend.
    """

    product: str
    calls: int
    backend: str
    variant: int
    before: float
    after: float


@contextmanager
def tune(seconds: float = 30.0) -> Iterator[list[Tuned]]:
    """Measures the matrix products of a region, for this process and later ones.

    A few training steps in the region are enough: it notes which products amp_ext computes, of
    which sizes, layouts and dtypes. At its end each of them is computed, on random operands, in
    every way that there is here: the plans of the CUDA and Triton kernels, torch's library; on a
    CPU our own kernel and FP32 or BF16 products of torch's library. Ways whose results differ from
    the default's by more than rounding are left out with a warning, the others timed in turn. The
    fastest one goes into a table in ``$XDG_CACHE_HOME/amp_ext`` (by default ``~/.cache/amp_ext``),
    in place of an older entry. Products are computed by it where ``AMP_EXT_GEMM`` is ``auto``, as
    by default, or ``measure``.

    A process reads the table of a device at its first product there. All processes of a distributed
    training that read one table choose alike.

    Args:
        seconds: how long to measure, after the region. Products that it does not suffice for, those
            of least work, keep their entries.

    Yields:
        A list, which holds a Tuned for each measured product in the end. A summary is printed.

    Raises:
        RuntimeError: within another such region.
        ValueError: seconds is not a positive number.
    """
    if not seconds > 0:
        raise ValueError(f"amp_ext.tune: seconds must be positive, got {seconds}")
    if not _C.start_noting():
        raise RuntimeError("amp_ext.tune: this is within another amp_ext.tune() region")
    results: list[Tuned] = []
    try:
        yield results
    finally:
        noted = _C.stop_noting()
    start = time.perf_counter()
    left = _measure_all(noted, start + seconds, results)
    print(_summary(results, left, time.perf_counter() - start))


def _measure_all(noted: list[_C.NotedProduct], deadline: float, results: list[Tuned]) -> int:
    """Appends to the results, and returns how many products there was no time for."""
    noted = [product for product in noted if len(_ways(product)) > 1]
    noted.sort(key=lambda product: -product.calls * product.multiplications)
    entries: dict[str, list[_table.Entry]] = {}
    left = 0
    for index, product in enumerate(noted):
        _show(f"amp_ext.tune: {'#' * index:-<{len(noted)}} {product}")
        remaining = deadline - time.perf_counter()
        if remaining <= 0:
            left = len(noted) - index
            break
        if tuned := _measure(product, remaining / (len(noted) - index)):
            results.append(tuned)
            entries.setdefault(product.device, []).append(_entry(product, tuned))
    _show("")
    for device, of_device in entries.items():
        _table.update(torch.device(device), of_device)
    return left


def measure_in_passing(product: _C.NotedProduct) -> None:
    """For C++, with AMP_EXT_GEMM=measure: measures a product that is in use, if there is time."""
    global _time_left
    if _time_left <= 0 or not _in_passing.acquire(blocking=False):
        return
    start = time.perf_counter()
    try:
        if tuned := _measure(product, min(_time_left, IN_PASSING / 20)):
            _table.update(torch.device(product.device), [_entry(product, tuned)])
    finally:
        _time_left -= time.perf_counter() - start
        _in_passing.release()


_time_left = IN_PASSING
_in_passing = threading.Lock()


# ---- one product -------------------------------------------------------------------------------


def _ways(product: _C.NotedProduct) -> list[Way]:
    return product.candidates(triton=not why_not_triton() and not is_interpreted())


def _measure(product: _C.NotedProduct, seconds: float) -> Tuned | None:
    """Which way takes the least time; None where nothing can be compared."""
    deadline = time.perf_counter() + seconds
    device = torch.device(product.device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            trial = _C.Trial(product)
            ways = _right(product, trial, deadline)
            if len(ways) < 2:
                return None
            times = _interleaved(trial, ways, device.type, deadline)
        except RuntimeError as error:  # out of memory, most likely
            warnings.warn(f"amp_ext.tune: {product}: not measured: {error}", stacklevel=2)
            return None
    default = ways[0]
    best = min(times, key=times.__getitem__)
    if times[default] < GAIN * times[best]:
        best = default
    return Tuned(str(product), product.calls, *best, times[default], times[best])


def _right(product: _C.NotedProduct, trial: _C.Trial, deadline: float) -> list[Way]:
    """The ways whose results are the first one's but for rounding, as far as there is time."""
    default, *others = _ways(product)
    expected = _results(product, trial, default)
    right = [default]
    for way in others:
        if time.perf_counter() > deadline:
            break
        try:
            results = _results(product, trial, way)
        except Exception as error:  # of any type, as when a Triton kernel does not compile
            problem = str(error).partition("\n")[0]
        else:
            problem = "" if _near(product, results, expected) else "its results are wrong"
        if problem:
            warnings.warn(f"amp_ext.tune: {product}: without {way}: {problem}", stacklevel=2)
        else:
            right.append(way)
    return right


def _results(product: _C.NotedProduct, trial: _C.Trial, way: Way) -> list[torch.Tensor]:
    for result in trial.results():
        result.fill_(0.0 if product.adds_to_out else math.nan)
    trial.run(*way)
    return [result.clone() for result in trial.results()]


def _near(
    product: _C.NotedProduct, results: list[torch.Tensor], expected: list[torch.Tensor]
) -> bool:
    """Whether they are equal but for rounding, for operands N(0, 1).

    Of `terms` products the partial sums are of size sqrt(terms) at most, and each is rounded to
    FP32. What may be rounded to the result's dtype a few times is the sum, c or bias, an
    intermediate sum. Sums of columns have the errors of their rows.
    """
    eps = torch.finfo(expected[0].dtype).eps
    terms = product.terms

    def is_near(result: torch.Tensor, of: torch.Tensor) -> bool:
        rows = 1 if of.dim() > 1 else product.rows
        error = rows * terms * 2.0**-22 + math.sqrt(rows) * 4 * eps * (2 + math.sqrt(terms))
        return torch.allclose(result.float(), of.float(), rtol=4 * eps, atol=product.factor * error)

    return all(map(is_near, results, expected))


def _interleaved(
    trial: _C.Trial, ways: Sequence[Way], device_type: str, deadline: float
) -> dict[Way, float]:
    """Seconds of each, 20th percentile: timed in turn, every second round in reverse order.

    What takes twice the time of another in the first rounds sits out the others, but for the first.
    """
    sample = _device_seconds if device_type == "cuda" else _C.Trial.run
    shortest = min(sample(trial, *way, 1) for way in ways)
    launches = max(1, math.ceil(SAMPLE[device_type] / shortest))
    samples: dict[Way, list[float]] = {way: [] for way in ways}

    def quantile(way: Way, share: float) -> float:
        return sorted(samples[way])[int(len(samples[way]) * share)]

    for count in itertools.count(1):
        for way in ways if count % 2 == 0 else reversed(ways):
            samples[way].append(sample(trial, *way, launches) / launches)
        if count == LEAST_ROUNDS:
            least = min(map(min, samples.values()))
            ways = [ways[0], *(way for way in ways[1:] if min(samples[way]) < 2 * least)]
        if count >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        if count % ENOUGH_ROUNDS == 0 and all(
            quantile(way, 0.5) < CALM * quantile(way, 0.2) for way in ways
        ):
            break
    return {way: quantile(way, 0.2) for way in samples}


def _device_seconds(trial: _C.Trial, backend: str, variant: int, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    trial.run(backend, variant, times)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# ---- what is remembered and said ---------------------------------------------------------------


def _entry(product: _C.NotedProduct, tuned: Tuned) -> _table.Entry:
    default = _ways(product)[0]
    reason = "measured: nothing is faster than the default"
    if (tuned.backend, tuned.variant) != default:
        other = "torch's library" if default[0] == "library" else "the default"
        reason = f"measured: {tuned.before / tuned.after:.2f} times {other}"
    return {
        "product": tuned.product,
        "key": product.key,
        "backend": tuned.backend,
        "variant": tuned.variant,
        "reason": reason,
    }


def _show(text: str) -> None:
    """In one line of a terminal, in place of what was there."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _summary(results: Sequence[Tuned], left: int, seconds: float) -> str:
    faster = [tuned for tuned in results if tuned.before > tuned.after]
    lines = [f"amp_ext.tune: {len(results)} products measured in {seconds:.1f} s"]
    if left:
        lines[0] += f", {left} not, since the time was over"
    if results:
        before, after = (
            sum(tuned.calls * getattr(tuned, when) for tuned in results)
            for when in ("before", "after")
        )
        lines.append(
            f"  {len(faster)} have something faster than the default; all calls of the region took "
            f"{before * 1e3:.3g} ms by the default, take {after * 1e3:.3g} ms"
        )
    for tuned in sorted(faster, key=lambda tuned: tuned.calls * (tuned.after - tuned.before)):
        gain = f"{tuned.before / tuned.after:.2f} times"
        way = f"{tuned.backend}{f' ({tuned.variant})' if tuned.variant else ''}"
        lines.append(f"  {gain:>12}  {way:12} {tuned.product}, {tuned.calls} calls")
    if (mode := _C.gemm_mode()) not in ("auto", "measure"):
        lines.append(f"  AMP_EXT_GEMM is {mode}: this process does not use it")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """``python -m amp_ext tune``: runs a script under :func:`tune`; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext tune",
        description="Measures which backend computes the matrix products of a script fastest. A "
        "few steps are enough: Ctrl-C ends the script, and the measurement begins.",
    )
    parser.add_argument("--seconds", type=_positive, default=30.0, help="to measure (%(default)s)")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    with tune(options.seconds):
        return _run(options.script)


def _positive(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return seconds


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        print("amp_ext.tune: the script was stopped", file=sys.stderr)
    except SystemExit as end:
        if not isinstance(end.code, int):
            print(end.code or "", end="\n" if end.code else "", file=sys.stderr)
            return int(bool(end.code))
        return end.code
    return 0
