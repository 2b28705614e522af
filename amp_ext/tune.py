"""Measure the fastest backend of matrix products, and keep it in a table.

``amp_ext.tune()`` and ``python -m amp_ext tune SCRIPT`` measure. C++ chooses by the table.
"""

import itertools
import math
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import _cache
from amp_ext._library import _C
from amp_ext._triton import is_interpreted, why_not_triton
from amp_ext._warnings import warn
from amp_ext.scaler.processes import is_distributed

Candidate = tuple[str, int]
"""A backend, and one of its variants of a product."""

PASSES, PASS_SECONDS = 3, 0.3
"""The number of passes over all products, and the longest measurement of a product in a pass. The
shortest times count, so that a disturbance of the machine for a while does not decide."""
MIN_ROUNDS = 3
SAMPLE_SECONDS = 1e-3
"""The seconds of a sample's calls, long enough for the clock to be exact."""
MIN_GAIN = 1.03
"""A candidate that is faster by less than this does not replace the default: it may be noise."""


class Tuned(NamedTuple):
    """Describe a product that was measured.

    Attributes:
        product: the product in words.
        calls: the number of calls in the region.
        backend: the backend that computes it from now on.
        variant: the plan of the backend, 0 for the plan that the backend itself prefers.
        before: seconds of a call by default, without measurements; 20th percentile.
        after: seconds of a call by that backend; 20th percentile.
    """

    product: str
    calls: int
    backend: str
    variant: int
    before: float
    after: float


_TYPES = (str, *(int,) * _C.GEMM_KEY_SIZE, str, int, str)
Entry = Sequence[Any]
"""An entry of the table: product in words, GemmKey (table.h), backend, variant, reason."""
_region = threading.Lock()
_own: dict[str, list[Entry]] = {}
"""The entries that this process has measured, by device, for a folder that is not writable."""


# ---- the table ---------------------------------------------------------------------------------


def load_table(device: str) -> int:
    """Read the table of a device for C++, at the first product there; return its length."""
    entries = [*_cache.read(device, "product", _TYPES), *_own.get(device, ())]
    table = {tuple(entry[1:-3]): tuple(entry[-3:]) for entry in entries}
    _C.set_measured(device, table)
    return len(table)


def update_table(device: str, entries: Sequence[Entry]) -> None:
    """Add entries to a device's table, in place of older ones."""
    _own.setdefault(device, []).extend(entries)
    if not _cache.append(device, "product", entries):
        warn("amp_ext: cannot write measurements to the cache folder")
    load_table(device)


# ---- all products ------------------------------------------------------------------------------


@contextmanager
def tune(seconds: float = 30.0) -> Iterator[list[Tuned]]:
    """Measure the matrix products of a region, for this process and later ones.

    A few training steps in the region are enough: it notes the products that amp_ext computes, with
    their sizes, layouts and dtypes. At its end, all candidates here compute each product on random
    operands: torch's library, the plans of the CUDA and of the Triton kernels; on a CPU the
    default, and the 16-bit GEMMs of MKL and oneDNN. A candidate with results that differ from the
    default's by more than rounding is excluded with a warning. The others are timed in turn.

    The fastest goes into a table in ``$XDG_CACHE_HOME/amp_ext`` (by default
    ``~/.cache/amp_ext``), in place of an older entry. If ``AMP_EXT_GEMM`` is ``auto``, as by
    default, it computes the product from then on.

    Args:
        seconds: how long to measure at most, after the region. If the time does not suffice, the
            products with the least work keep their entries.

    Yields:
        A list. Finally it holds a Tuned for each measured product. A summary is printed.

    Raises:
        RuntimeError: within another such region, or in a process of several that train together:
            each would measure something else.
        ValueError: seconds is not a positive number.
    """
    if not seconds > 0:
        raise ValueError(f"amp_ext.tune: seconds must be positive, got {seconds}")
    _refuse_several_processes()
    if not _region.acquire(blocking=False):
        raise RuntimeError("amp_ext.tune: this is within another amp_ext.tune() region")
    results: list[Tuned] = []
    try:
        with _Noting() as noting:
            yield results
    finally:
        _region.release()
    _refuse_several_processes()
    start = time.perf_counter()
    products = list(noting.products.values())
    products.sort(key=lambda product: -product.calls * math.prod(product.sizes))
    _measure_all(products, start + seconds, results)
    print(_summary(results, len(products), time.perf_counter() - start))


def _refuse_several_processes() -> None:
    processes = torch.distributed.get_world_size() if is_distributed() else 1
    if max(processes, int(os.environ.get("WORLD_SIZE") or "1")) > 1:
        raise RuntimeError(
            "amp_ext.tune: the processes of a distributed training would choose differently; "
            "measure in one process before it, such as with: python -m amp_ext tune SCRIPT"
        )


def _measure_all(products: "list[_Product]", deadline: float, results: list[Tuned]) -> None:
    """Append to the results while there is time, and update the tables."""
    times: list[dict[Candidate, float]] = [{} for _ in products]
    steps = PASSES * len(products)
    try:
        for step in range(steps):
            product, known = products[step % len(products)], times[step % len(products)]
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                break
            seconds = min(PASS_SECONDS, remaining / (steps - step))
            for candidate, shortest in _measure(product, seconds).items():
                known[candidate] = min(shortest, known.get(candidate, math.inf))
    finally:
        entries: dict[str, list[Sequence[Any]]] = {}
        for product, measured in zip(products, times, strict=True):
            if not measured:
                continue
            default = next(iter(measured))
            best = min(measured.keys() - product.wrong, key=measured.__getitem__)
            if measured[default] < MIN_GAIN * measured[best]:
                best = default
            before, after = measured[default], measured[best]
            results.append(Tuned(str(product), product.calls, *best, before, after))
            reason = "measured: nothing is faster than the default"
            if before > after:
                reason = f"measured: {before / after:.2f} times as fast as the default"
            entry = (str(product), *product.key, *best, reason)
            entries.setdefault(product.device, []).append(entry)
        for device, new in entries.items():
            update_table(device, new)


def _summary(results: Sequence[Tuned], products: int, seconds: float) -> str:
    lines = [f"amp_ext.tune: {len(results)} of {products} products measured in {seconds:.1f} s"]
    faster = [tuned for tuned in results if tuned.before > tuned.after]
    for tuned in sorted(faster, key=lambda tuned: tuned.calls * (tuned.after - tuned.before)):
        gain = f"{tuned.before / tuned.after:.2f} times"
        by = f"{tuned.backend}{f' ({tuned.variant})' if tuned.variant else ''}"
        lines.append(f"  {gain:>12}  {by:12} {tuned.product}, {tuned.calls} calls")
    before = sum(tuned.calls * tuned.before for tuned in results) * 1e3
    after = sum(tuned.calls * tuned.after for tuned in results) * 1e3
    lines.append(f"  all calls of the region: {before:.3g} ms before, {after:.3g} ms now")
    if (mode := _C.gemm_mode()) != "auto":
        lines.append(f"  AMP_EXT_GEMM is {mode}: this process does not use the measurements")
    return "\n".join(lines)


# ---- the products of a region ------------------------------------------------------------------

_OPS = {
    torch.ops.amp_ext.gemm.default: ("a", "b"),
    torch.ops.amp_ext.gemm_accumulate_.default: ("c", "a", "b"),
}
"""The ops of products, and the names of their positional arguments."""


class _Like(NamedTuple):
    """Describe a tensor without its data; `shift` elements lie before it in aligned memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    shift: int

    def random(self, generator: torch.Generator) -> Tensor:
        ends = zip(self.shape, self.stride, strict=True)
        size = self.shift + 1 + sum((count - 1) * stride for count, stride in ends)
        memory = torch.empty(size, dtype=self.dtype, device=generator.device)
        return memory.normal_(generator=generator).as_strided(self.shape, self.stride, self.shift)


class _Product:
    """Describe a product of a region, without its operands' data."""

    def __init__(self, device: str, key: Sequence[int], arguments: dict[str, Any]) -> None:
        self.device, self.key, self.calls = device, key, 0
        self.sizes = key[2:]  # batch, summed products, m, n and k
        self.wrong: set[Candidate] = set()
        self.arguments: dict[str, Any] = {
            name: _Like(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 // x.element_size())
            if isinstance(x, Tensor)
            else x
            for name, x in arguments.items()
        }

    def __str__(self) -> str:
        batch, terms, m, n, k = self.sizes
        count = f"{batch * terms} x " if batch * terms > 1 else ""
        dtypes = [str(self.arguments[name].dtype).removeprefix("torch.") for name in "ab"]
        options = [name for name in self.arguments if name not in ("a", "b")]
        return ", ".join([f"{count}[{m}, {k}] @ [{k}, {n}]", " @ ".join(dtypes), *options])


class _Noting(TorchDispatchMode):
    """Note the distinct products of plain tensors in this thread and its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[tuple[str, tuple[int, ...]], _Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)  # its checks come first
        if names := _OPS.get(func):
            options = {**kwargs, "accumulates": True} if "c" in names else kwargs
            self._note(dict(zip(names, args, strict=True)) | options)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch.compile compile in the region. Compiled products are noted as they run."""
        return True

    def _note(self, arguments: dict[str, Any]) -> None:
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        plain = Tensor.__torch_dispatch__
        if any(type(x).__torch_dispatch__ is not plain or x.is_meta for x in tensors):
            return
        device, key = str(tensors[0].device), tuple(_C.Product(**arguments).key)
        if 0 not in key[2:]:
            product = _Product(device, key, arguments)
            self.products.setdefault((device, key), product).calls += 1


# ---- one product -------------------------------------------------------------------------------


class _Trial:
    """Compute a product on random operands. The user's random numbers stay as they are."""

    def __init__(self, product: _Product) -> None:
        generator = torch.Generator(product.device)
        generator.seed()  # freed memory never holds these operands' result
        arguments = {
            name: x.random(generator) if isinstance(x, _Like) else x
            for name, x in product.arguments.items()
        }
        self._target = arguments["c"] if "accumulates" in arguments else None
        self._product = _C.Product(**arguments)
        self.device = generator.device
        has_triton = not why_not_triton() and not is_interpreted()
        self.candidates: list[Candidate] = self._product.candidates(has_triton)

    def result(self, candidate: Candidate) -> Tensor:
        """Return the result of one call, in memory of its own."""
        if self._target is None:
            return self._product.compute(*candidate)
        self._target.zero_()
        return self._product.compute(*candidate).clone()

    def seconds(self, candidate: Candidate, calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._product.compute(*candidate, calls)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _measure(product: _Product, seconds: float) -> dict[Candidate, float]:
    """Return the seconds of a call by each candidate, the default first, if there are several."""
    deadline = time.perf_counter() + seconds
    try:
        trial = _Trial(product)
        right = _right_candidates(product, trial, deadline)
        return _interleaved(trial, right, deadline) if len(right) > 1 or product.wrong else {}
    except RuntimeError as error:  # most likely out of memory
        warn(f"amp_ext.tune: {product}: not measured: {error}")
        return {}


def _right_candidates(product: _Product, trial: _Trial, deadline: float) -> list[Candidate]:
    """Return the default and the candidates with its result; after the deadline, just one more."""
    default, *others = trial.candidates
    expected = trial.result(default)
    right = [default]
    for candidate in others:
        if len(right) > 1 and time.perf_counter() > deadline:
            break  # those compiled so far take less time in the next pass
        try:
            result = trial.result(candidate)
        except Exception as error:  # of any type, as when a Triton kernel does not compile
            # The same text for all products, so that it is shown once.
            problem = str(error).partition("\n")[0]
            warn(f"amp_ext.tune: left out: {candidate[0]}: {problem}")
            continue
        if _is_near(product, result, expected):
            right.append(candidate)
        else:
            product.wrong.add(candidate)
            warn(f"amp_ext.tune: left out: {candidate}: a wrong result of {product}")
        result.fill_(math.nan)  # for the next one, which may get this memory
    return right


def _is_near(product: _Product, result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two results are equal except for rounding, for operands N(0, 1).

    Partial sums of `terms` products are of size sqrt(terms) at most, and each is rounded to FP32.
    The sum, c or bias, and an intermediate sum may be rounded to the result's dtype a few times.
    """
    eps = torch.finfo(expected.dtype).eps
    _, summed, _, _, k = product.sizes
    terms = summed * k
    error = terms * 2.0**-22 + 4 * eps * (2 + math.sqrt(terms))
    atol = max(1.0, *(abs(product.arguments.get(name, 1.0)) for name in ("alpha", "beta"))) * error
    return torch.allclose(result.float(), expected.float(), rtol=4 * eps, atol=atol)


def _interleaved(trial: _Trial, right: list[Candidate], deadline: float) -> dict[Candidate, float]:
    """Return the seconds of a call by each candidate, 20th percentile.

    The candidates are timed in turn, and in reverse.
    """
    shortest = min(trial.seconds(candidate, 1) for candidate in right)
    calls = max(1, math.ceil(SAMPLE_SECONDS / shortest))
    samples: dict[Candidate, list[float]] = {candidate: [] for candidate in right}
    for count in itertools.count(1):
        for candidate in right if count % 2 == 0 else reversed(right):
            samples[candidate].append(trial.seconds(candidate, calls) / calls)
        if count >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
    return {candidate: sorted(times)[len(times) // 5] for candidate, times in samples.items()}


def main(script: str, *arguments: str) -> object:
    """Run a script under :func:`tune`, and return the argument of sys.exit.

    Ctrl-C ends the script, and the measurement begins.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    status: object = 0
    with tune():
        try:
            runpy.run_path(script, run_name="__main__")
        except KeyboardInterrupt:
            print("amp_ext.tune: the script was stopped", file=sys.stderr)
        except SystemExit as end:
            status = end.code
    return status
