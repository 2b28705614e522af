"""With AMP_EXT_TRITON_AUTOTUNE=1 the candidates of a product are timed, once in a process.

Times differ from process to process, and so may the plan and with it the results' last bits. In a
process products of equal sizes are formed alike, but for those that a graph captured before the
first one was timed.
"""

from __future__ import annotations

from statistics import median

import torch
from amp_ext.triton_kernels.gemm.launches import Launch, launches
from amp_ext.triton_kernels.gemm.product import Product
from amp_ext.triton_kernels.gemm.plan import Device, Plan, Problem

CANDIDATES = 4
SAMPLES = 5
RUNS = 10
"""Of a sample."""
QUEUEING = 2**23
"""Cycles in which the host queues a sample: some milliseconds."""

_fastest: dict[tuple, Plan] = {}


def fastest(p: Product, problem: Problem, plans: list[Plan], device: Device) -> Plan:
    """Return the plan that took the least time, or the predicted one while a graph is captured."""
    key = (problem, device, p.out.tensor.device.index, p.activation, p.derivative)
    key += tuple(x and (x.tensor.dtype, x.layout()) for x in (p.a, p.b, p.out, p.c, p.aux))
    if key not in _fastest:
        if torch.cuda.is_current_stream_capturing():
            return plans[0]
        scratch = _elsewhere(p)
        _fastest[key] = min(
            plans[:CANDIDATES], key=lambda plan: _milliseconds(launches(scratch, plan, device))
        )
    return _fastest[key]


def _elsewhere(p: Product) -> Product:
    """Return the product with memory of its own for all that it writes."""

    written = {"column_sums": None if p.column_sums is None else torch.empty_like(p.column_sums)}
    for name in ("out",) if p.derivative or not p.aux else ("out", "aux"):
        matrices = getattr(p, name)
        t = matrices.tensor
        tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        written[name] = matrices._replace(tensor=tensor)
    return p._replace(**written)


def _milliseconds(timed: list[Launch]) -> float:
    """Return the median of the samples' times."""
    _run(timed)  # which compiles
    return median(_sample(timed) for _ in range(SAMPLES))


def _sample(timed: list[Launch]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device waits until all is queued, for not to be waiting in between.
    torch.cuda._sleep(QUEUEING)
    start.record()
    for _ in range(RUNS):
        _run(timed)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _run(timed: list[Launch]) -> None:
    for launch in timed:
        launch.run()
