"""What a list costs before and beside its bytes: launches, bytes in tables, time of the host."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from torch import Tensor

from executors import SIMT, Executor, kernels_against_oracle
from simt.library import Schedule
from simt_ops import Ops

needs_simt = pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing)

LISTS = (1, 110, 771, 5_000, 100_000)
CALLS = {
    "unscale_": lambda ops, grads, found: ops.unscale_(grads, found, torch.tensor(0.5)),
    "check_finite": lambda ops, grads, found: ops.check_finite(grads, found),
    "grad_norm": lambda ops, grads, found: ops.grad_norm(grads, found),
    "grad_norm with norms": lambda ops, grads, found: ops.grad_norm(
        grads, found, norms=torch.zeros(len(grads))
    ),
    "grad_norm_update_scale_": lambda ops, grads, found: ops.grad_norm_update_scale_(
        grads, found, None, torch.ones(()), torch.zeros((), dtype=torch.int32), 2.0, 0.5, 1
    ),
}


@needs_simt
@pytest.mark.parametrize(
    ("name", "count"),
    # A block_sum for each of 100,000 tensors takes the executor half a minute.
    [(name, n) for name in CALLS for n in LISTS if "norms" not in name or n < 100_000],
)
def test_one_launch_for_any_list(name: str, count: int) -> None:
    ops = Ops(Schedule(count))
    grads = list(torch.ones(count, 3).unbind())
    found_inf = torch.zeros(())
    before = ops.engine.counters()
    CALLS[name](ops, grads, found_inf)
    assert (ops.engine.counters() - before).launches == 1
    assert found_inf.item() == 0.0
    grads[-1][-1] = math.inf
    CALLS[name](ops, grads, found_inf)
    assert found_inf.item() == 1.0


@needs_simt
def test_a_table_costs_the_host_little() -> None:
    """20 ns a tensor to build a chunk table and to see whether it is the last one again.

    It takes 3 to 5 ns; the best of many runs is not disturbed by what else the machine does.
    """
    count = 5_000
    best = SIMT.ops.table_seconds(list(torch.ones(count, 3).unbind()))
    assert best / count < 20e-9


def lazily_mapped(elements: int, last: float) -> Tensor:
    """Return float16 zeros that take no memory until they are written, and a last element."""
    memory = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    tensor = torch.frombuffer(memory, dtype=torch.float16)
    tensor[-1] = last
    return tensor


@kernels_against_oracle
@pytest.mark.parametrize("last", [2.0, math.nan])
def test_more_than_2_to_the_31_elements(executor: Executor, last: float) -> None:
    if executor.device.type == "cuda":
        grad = torch.zeros(2**31 + 5, dtype=torch.float16, device=executor.device)
        grad[-1] = last
    else:
        grad = lazily_mapped(2**31 + 5, last)
    found_inf, bad_tensor = executor.scalar(0.0), executor.scalar(-1, torch.int64)
    executor.ops.check_finite([grad], found_inf, bad_tensor)
    found = math.isnan(last)
    assert (found_inf.item(), bad_tensor.item()) == ((1.0, 0) if found else (0.0, -1))
    norm = executor.ops.grad_norm([grad], found_inf)
    assert norm.item() == 2.0 or found
