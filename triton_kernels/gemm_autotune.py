"""With AMP_EXT_TRITON_AUTOTUNE=1 the candidates of a product are timed, once."""

from __future__ import annotations

import torch
from amp_ext.triton_kernels.gemm_launches import launches
from amp_ext.triton_kernels.gemm_operands import Product
from amp_ext.triton_kernels.gemm_plan import Device, Plan, Problem
from torch import Tensor

CANDIDATES = 4
RUNS = 10

_fastest: dict[tuple, Plan] = {}


def fastest(p: Product, problem: Problem, plans: tuple[Plan, ...], device: Device) -> Plan:
    """Return the plan that took the least time, or the predicted one while a graph is captured."""
    key = (problem, device, p.out.tensor.device.index, p.activation, p.derivative)
    key += tuple(x and (x.tensor.dtype, x.layout()) for x in (p.a, p.b, p.out, p.c, p.aux))
    if key not in _fastest:
        if torch.cuda.is_current_stream_capturing():
            return plans[0]
        scratch = _elsewhere(p)
        _fastest[key] = min(plans[:CANDIDATES], key=lambda plan: _seconds(scratch, plan, device))
    return _fastest[key]


def _elsewhere(p: Product) -> Product:
    """Return the product with memory of its own for all that it writes."""

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor)

    written = {name: like(getattr(p, name)) for name in ("column_sums", "found_inf", "square_sum")}
    for name in ("out",) if p.derivative or not p.aux else ("out", "aux"):
        matrices = getattr(p, name)
        t = matrices.tensor
        tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        written[name] = matrices._replace(tensor=tensor)
    return p._replace(**written)


def _seconds(p: Product, plan: Plan, device: Device) -> float:
    timed = launches(p, plan, device)
    for launch in timed:  # which compiles
        launch.run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(RUNS):
        for launch in timed:
            launch.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
