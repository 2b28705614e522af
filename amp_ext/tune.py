"""Measures which backend computes a matrix product fastest: ``amp_ext.tune()``, and ``python -m
amp_ext tune SCRIPT``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from amp_ext import _table
from amp_ext._library import _C
from amp_ext._triton import is_interpreted, why_not_triton
from amp_ext._warnings import warn

Candidate = tuple[str, int]
"""A backend, and one of its variants of a product."""

PASSES, PASS_SECONDS = 3, 0.3
"""All products are measured so often, each for so long at most, and the shortest times count: what
disturbs the machine for a while does not decide."""
MIN_ROUNDS = 3
SAMPLE_SECONDS = {"cpu": 2e-5, "cuda": 1e-3}
"""A sample is of as many calls as take so long, for the clock to be exact."""
MIN_GAIN = 1.03
"""A candidate that is faster by less than this does not replace the default: it may be noise."""


class Tuned(NamedTuple):
    """A product that was measured.

    Attributes:
        product: in words.
        calls: how often it was computed in the region.
        backend: what computes it from now on.
        variant: which of the backend's plans, 0 for the one that it prefers itself.
        before: seconds of a call by default, as where nothing is measured; 20th percentile.
        after: seconds of a call by that backend; 20th percentile.
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
    which sizes, layouts and dtypes. At its end each of them is computed, on random operands, by
    all that can compute it here: torch's library, the plans of the CUDA and of the Triton kernels;
    on a CPU our own kernel, torch's FP32 and its 16-bit GEMM. Those whose
    results differ from the default's by more than rounding are left out with a warning, the others
    timed in turn. The fastest goes into a table in ``$XDG_CACHE_HOME/amp_ext`` (by default
    ``~/.cache/amp_ext``), in place of an older entry. Where ``AMP_EXT_GEMM`` is ``auto``, as by
    default, it computes the product from then on.

    A process reads the table of a device at its first product there. All processes of a distributed
    training that read one table choose alike.

    Args:
        seconds: how long to measure at most, after the region. Those products with the least work
            that it does not suffice for keep their entries.

    Yields:
        A list, which holds a Tuned for each measured product in the end. A summary is printed.

    Raises:
        RuntimeError: within another such region, or in a process of several that train together:
            each would measure something else.
        ValueError: seconds is not a positive number.
    """
    if not seconds > 0:
        raise ValueError(f"amp_ext.tune: seconds must be positive, got {seconds}")
    _refuse_several_processes()
    if not _C.start_noting():
        raise RuntimeError("amp_ext.tune: this is within another amp_ext.tune() region")
    results: list[Tuned] = []
    try:
        yield results
    finally:
        noted = _C.stop_noting()
    _refuse_several_processes()
    start = time.perf_counter()
    triton = not why_not_triton() and not is_interpreted()
    choices = [(product, product.candidates(triton)) for product in noted]
    choices = [(product, candidates) for product, candidates in choices if len(candidates) > 1]
    _measure_all(choices, start + seconds, results)
    print(_summary(results, len(choices), time.perf_counter() - start))


def _measure_all(
    choices: list[tuple[_C.NotedProduct, list[Candidate]]], deadline: float, results: list[Tuned]
) -> None:
    """Appends to the results while there is time, those with the most work first."""
    choices.sort(key=lambda choice: -choice[0].calls * choice[0].multiplications)
    times: list[dict[Candidate, float]] = [{} for _ in choices]
    steps = PASSES * len(choices)
    try:
        for step in range(steps):
            product, candidates = choices[step % len(choices)]
            known = times[step % len(choices)]
            _show(f"amp_ext.tune: [{'#' * (20 * step // steps):-<20}] {product}")
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                break
            seconds = min(PASS_SECONDS, remaining / (steps - step))
            for candidate, shortest in _measure(product, candidates, seconds).items():
                known[candidate] = min(shortest, known.get(candidate, math.inf))
    finally:
        _show("")
        entries: dict[str, list[_table.Entry]] = {}
        for (product, candidates), of_product in zip(choices, times, strict=True):
            if of_product:
                results.append(_fastest(product, candidates[0], of_product))
                entries.setdefault(product.device, []).append(_entry(product, results[-1]))
        for device, of_device in entries.items():
            _table.update(torch.device(device), of_device)


def _refuse_several_processes() -> None:
    if _is_distributed() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "amp_ext.tune: the processes of a distributed training would choose differently; "
            "measure in one process before it, such as with: python -m amp_ext tune SCRIPT"
        )


def _is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


# ---- one product -------------------------------------------------------------------------------


def _measure(
    product: _C.NotedProduct, candidates: list[Candidate], seconds: float
) -> dict[Candidate, float]:
    """Seconds of a call by each candidate; none where there is nothing to compare."""
    if len(candidates) < 2:
        return {}
    deadline = time.perf_counter() + seconds
    device = torch.device(product.device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            trial = _C.Trial(product)
            candidates = _without_wrong_ones(product, trial, candidates, deadline)
            if len(candidates) < 2:
                return {}
            return _interleaved(trial, candidates, device.type, deadline)
        except RuntimeError as error:  # out of memory, most likely
            warn(f"amp_ext.tune: {product}: not measured: {error}")
            return {}


def _fastest(product: _C.NotedProduct, default: Candidate, times: dict[Candidate, float]) -> Tuned:
    best = min(times, key=times.__getitem__)
    if times[default] < MIN_GAIN * times[best]:
        best = default
    return Tuned(str(product), product.calls, *best, times[default], times[best])


def _without_wrong_ones(
    product: _C.NotedProduct, trial: _C.Trial, candidates: list[Candidate], deadline: float
) -> list[Candidate]:
    """Those whose results are the first one's but for rounding, as far as there is time."""
    default, *others = candidates
    expected = _results(product, trial, default)
    right = [default]
    for candidate in others:
        if time.perf_counter() > deadline:
            break
        try:
            results = _results(product, trial, candidate)
        except Exception as error:  # of any type, as when a Triton kernel does not compile
            # The same text for all products, so that it is shown once.
            problem = str(error).partition("\n")[0]
            warn(f"amp_ext.tune: left out: {candidate[0]}: {problem}")
            continue
        if _near(product, results, expected):
            right.append(candidate)
        else:
            warn(f"amp_ext.tune: left out: {candidate}: wrong results of {product}")
    return right


def _results(product: _C.NotedProduct, trial: _C.Trial, candidate: Candidate) -> list[torch.Tensor]:
    for result in trial.results():
        result.fill_(0.0 if product.adds_to_out else math.nan)
    trial.run(*candidate)
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
    trial: _C.Trial, candidates: Sequence[Candidate], device_type: str, deadline: float
) -> dict[Candidate, float]:
    """Seconds of a call by each, 20th percentile, timed in turn and every second round in reverse.

    What takes twice the time of another in the first rounds is left out of the others, but for the
    default, which is the first.
    """
    sample = _device_seconds if device_type == "cuda" else _C.Trial.run
    shortest = min(sample(trial, *candidate, 1) for candidate in candidates)
    calls = max(1, math.ceil(SAMPLE_SECONDS[device_type] / shortest))
    samples: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for count in itertools.count(1):
        for candidate in candidates if count % 2 == 0 else reversed(candidates):
            samples[candidate].append(sample(trial, *candidate, calls) / calls)
        if count == MIN_ROUNDS:
            limit = 2 * min(map(min, samples.values()))
            candidates = [c for c in candidates if c == candidates[0] or min(samples[c]) < limit]
        if count >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
    return {candidate: sorted(times)[len(times) // 5] for candidate, times in samples.items()}


def _device_seconds(trial: _C.Trial, backend: str, variant: int, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    trial.run(backend, variant, calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# ---- what is remembered and said ---------------------------------------------------------------


def _entry(product: _C.NotedProduct, tuned: Tuned) -> _table.Entry:
    reason = "measured: nothing is faster than the default"
    if tuned.before > tuned.after:
        reason = f"measured: {tuned.before / tuned.after:.2f} times as fast as the default"
    return _table.Entry(tuned.product, product.key, tuned.backend, tuned.variant, reason)


def _show(text: str) -> None:
    """In one line of a terminal, in place of what was there."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _summary(results: Sequence[Tuned], products: int, seconds: float) -> str:
    faster = [tuned for tuned in results if tuned.before > tuned.after]
    lines = [f"amp_ext.tune: {len(results)} of {products} products measured in {seconds:.1f} s"]
    if results:
        before = sum(tuned.calls * tuned.before for tuned in results)
        after = sum(tuned.calls * tuned.after for tuned in results)
        lines.append(
            f"  {len(faster)} can be computed faster than by default; all calls of the region: "
            f"{before * 1e3:.3g} ms before, {after * 1e3:.3g} ms now"
        )
    for tuned in sorted(faster, key=lambda tuned: tuned.calls * (tuned.after - tuned.before)):
        gain = f"{tuned.before / tuned.after:.2f} times"
        by = f"{tuned.backend}{f' ({tuned.variant})' if tuned.variant else ''}"
        lines.append(f"  {gain:>12}  {by:12} {tuned.product}, {tuned.calls} calls")
    if (mode := _C.gemm_mode()) != "auto":
        lines.append(f"  AMP_EXT_GEMM is {mode}: this process does not use the measurements")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> object:
    """``python -m amp_ext tune``: runs a script under :func:`tune`; returns what sys.exit takes."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext tune",
        description="Measures which backend computes the matrix products of a script fastest. A "
        "few steps are enough: Ctrl-C ends the script, and the measurement begins.",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure (%(default)s)")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds must be positive, got {options.seconds}")
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    status: object = 0
    with tune(options.seconds):
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except KeyboardInterrupt:
            print("amp_ext.tune: the script was stopped", file=sys.stderr)
        except SystemExit as end:
            status = end.code
    return status
