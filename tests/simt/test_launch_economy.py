"""What a list costs before and beside its bytes: launches, bytes in tables, time of the host."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from torch import Tensor

from cases import FLOATS
from executors import SIMT, Executor, against_oracle
from simt.library import Counters, Schedule
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
@pytest.mark.parametrize("name", CALLS)
def test_no_launch_for_no_tensors(name: str) -> None:
    """But for the norm, which is 0 then."""
    ops = Ops()
    before = ops.engine.counters()
    CALLS[name](ops, [], torch.zeros(()))
    assert (ops.engine.counters() - before).launches == int("norm" in name)


def cost(ops: Ops, name: str, grads: list[Tensor], *arguments: Tensor) -> Counters:
    before = ops.engine.counters()
    getattr(ops, name)(grads, torch.zeros(()), *arguments)
    return ops.engine.counters() - before


@needs_simt
@pytest.mark.parametrize(
    ("name", "factor", "writes"),
    [
        ("unscale_", 0.5, True),
        ("unscale_", 1.0, False),
        ("check_finite", None, False),
        ("grad_norm", 0.5, False),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reads_and_writes_each_pack_once(
    dtype: torch.dtype, name: str, factor: float | None, writes: bool
) -> None:
    """In one launch; at most 7 elements at either end of a tensor go one by one."""
    chunks, multiprocessors = 5, 2
    grads = [torch.ones(chunks * 16384 - 8, dtype=dtype), torch.ones(40, dtype=dtype)[1:]]
    arguments = [] if factor is None else [torch.tensor(factor)]
    counted = cost(Ops(Schedule(3, 2, multiprocessors)), name, grads, *arguments)
    packs = sum(
        (grad.numel() - -grad.data_ptr() % 16 // dtype.itemsize) // (16 // dtype.itemsize)
        for grad in grads
    )
    assert counted.launches == 1
    assert counted.blocks == 2 * multiprocessors
    assert counted.bytes_loaded == 16 * packs
    assert counted.bytes_stored == (16 * packs if writes else 0)


@needs_simt
@pytest.mark.parametrize(
    ("norm", "max_norm", "passes"), [(2.0, 1.0, 1), (2.0, 3.0, 0), (math.nan, 1.0, 0)]
)
def test_clipping_moves_memory_only_where_it_must(
    norm: float, max_norm: float, passes: int
) -> None:
    ops, grads = Ops(), [torch.ones(4096, dtype=dtype) for dtype in FLOATS]
    before = ops.engine.counters()
    ops.unscale_(
        grads, torch.zeros(()), torch.tensor(1.0), norm=torch.tensor(norm), max_norm=max_norm
    )
    counted = ops.engine.counters() - before
    size = sum(grad.nbytes for grad in grads)
    assert counted.launches == 1
    assert (counted.bytes_loaded, counted.bytes_stored) == (passes * size, passes * size)


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


@against_oracle
@pytest.mark.parametrize("last", [2.0, math.nan])
def test_more_than_2_to_the_31_elements(executor: Executor, last: float) -> None:
    if executor.interpreted:
        pytest.skip("takes Triton's interpreter a quarter of an hour")
    if executor.device.type == "cuda":
        grad = torch.zeros(2**31 + 5, dtype=torch.float16, device=executor.device)
        grad[-1] = last
    else:
        grad = lazily_mapped(2**31 + 5, last)
    found_inf = executor.scalar(0.0)
    executor.ops.check_finite([grad], found_inf)
    found = math.isnan(last)
    assert found_inf.item() == float(found)
    norm = executor.ops.grad_norm([grad], found_inf)
    assert norm.item() == 2.0 or found
