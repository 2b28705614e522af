"""With AMP_EXT_TRITON_AUTOTUNE=1 the candidates of a product are timed, once in a process.

Times differ from process to process, and so may the plan and with it the results' last bits. In a
process products of equal sizes are computed alike, but for those that a graph captured before the
first one was timed.
"""

from __future__ import annotations

from typing import Any

import torch
from amp_ext.triton_kernels.gemm.launches import Launches, launches
from amp_ext.triton_kernels.gemm.plan import Device, candidates
from amp_ext.triton_kernels.gemm.product import Product
from triton.testing import do_bench_cudagraph

CANDIDATES = 4

_fastest: dict[tuple[Product, int, Device], Launches] = {}


def fastest(product: Product, device: Device, values: dict[str, Any]) -> Launches:
    """Return what took the least time, or what is predicted to while a graph is captured."""
    key = product, values["out"].device.index, device
    if key not in _fastest:
        plans = candidates(product.problem(device.has_tma), device)
        choices = [launches(product, plan, device) for plan in plans[:CANDIDATES]]
        if torch.cuda.is_current_stream_capturing():
            return choices[0]
        scratch = _elsewhere(product, values)
        times = [_milliseconds(choice, scratch) for choice in choices]
        _fastest[key] = choices[times.index(min(times))]
    return _fastest[key]


def _milliseconds(choice: Launches, values: dict[str, Any]) -> float:
    return do_bench_cudagraph(lambda: choice.run(values), return_mode="median")


def _elsewhere(product: Product, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with memory of their own for all that is written."""
    written = ("out", "column_sums") if product.derivative else ("out", "column_sums", "aux")
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for name in written
        if (x := values[name]) is not None
    }
    return {**values, **copies}
