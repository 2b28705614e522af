"""Test the cost of a list besides its bytes: launches, bytes in tables, time of the host."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_ext import ops
from cases import FLOATS
from executors import CUDA, ON_CUDA, Executor, native
from fake_cuda.recorder import cost, schedule
from optim_cases import OPS
from optim_cases import call as update

pytestmark = pytest.mark.full
Call = tuple[Callable[..., Any], dict[str, Any]]


def call(op: str, count: int, size: int = 3) -> Call:
    """Return an op with a list of so many tensors of that size."""
    if op in OPS:
        values = update(ON_CUDA, op, [(size,)] * max(count, 1))
        lists = {name: x[:count] for name, x in values.items() if isinstance(x, list)}
        return getattr(ops, op), values | lists
    grads = list(torch.ones(count, size, device=CUDA).unbind())
    if op == "cast_":
        return ops.cast_, {"outputs": [grad.half() for grad in grads], "inputs": grads}
    values = {"grads": grads, "found_inf": ON_CUDA.scalar(0.0)}
    if op == "unscale_":
        values["inv_scale"] = ON_CUDA.scalar(0.5)
    return getattr(ops, op), values


CALLS = ("unscale_", "check_finite", "grad_norm", "cast_", *OPS)
ENTRIES = {"cast_": 32, **dict.fromkeys(OPS, 80)}
"""The bytes of a tensor's entry in the table, where they are not 24."""
# Tensors in a list that is as long as a table of each size, and one longer.
LENGTHS = {
    24: (1, 42, 43, 256, 257, 1344, 1345, 5_000),
    32: (32, 33, 192, 193, 1008, 1009),
    80: (12, 13, 76, 77, 403, 404),
}


@pytest.mark.fake_cuda
@pytest.mark.parametrize(
    ("op", "count"),
    [
        *((op, count) for op in CALLS for count in LENGTHS[ENTRIES.get(op, 24)]),
        ("check_finite", 100_000),
    ],
)
def test_one_launch_for_any_list(op: str, count: int) -> None:
    """One launch has the smallest of the tables that holds so many entries."""
    function, values = call(op, count)
    sizes = (1 << 10, 6 << 10, 32256)
    table = next((size for size in sizes if count * ENTRIES.get(op, 24) <= size), 0)
    with schedule(count):  # in a random order, the longest list looks like an endless loop
        counted = cost(function, **values)
        if op not in OPS:
            values["inputs" if op == "cast_" else "grads"][-1][-1] = math.inf
            function(**values)
    assert counted.launches == 1
    assert counted.parameter_bytes <= 256 + table
    if op in OPS:
        assert values["steps"][-1].item() == 3 * (count - 1) + 1
    else:
        assert (values["outputs"][-1][-1] if op == "cast_" else values["found_inf"]) > 0


@pytest.mark.fake_cuda
@pytest.mark.parametrize("op", CALLS)
def test_no_launch_for_no_tensors(op: str) -> None:
    """A list without tensors takes no launch, except a norm of 0."""
    function, values = call(op, 0)
    assert cost(function, **values).launches == int(op == "grad_norm")


@pytest.mark.fake_cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reads_and_writes_each_pack_once(dtype: torch.dtype) -> None:
    """One launch reads and writes each pack once, or nothing where a clip changes nothing.

    At most 7 elements at either end of a tensor go one by one.
    """
    chunks, multiprocessors = 5, 2
    for op, factors, norm, reads, writes in (
        (ops.unscale_, [0.5], None, True, True),
        (ops.unscale_, [1.0], None, True, False),
        (ops.unscale_, [1.0], 2.0, True, True),
        (ops.unscale_, [1.0], 0.5, False, False),
        (ops.unscale_, [1.0], math.nan, False, False),
        (ops.check_finite, [], None, True, False),
        (ops.grad_norm, [0.5], None, True, False),
    ):
        grads = [torch.ones(n, dtype=dtype, device=CUDA) for n in (chunks * 16384 - 8, 40)]
        grads[1] = grads[1][1:]
        clip = {"norm": ON_CUDA.scalar(norm), "max_norm": 1.0} if norm else {}
        scalars = map(ON_CUDA.scalar, (0.0, *factors))
        with schedule(3, multiprocessors):
            counted = cost(op, grads, *scalars, **clip)
        packs = sum(
            (grad.numel() - -grad.data_ptr() % 16 // dtype.itemsize) // (16 // dtype.itemsize)
            for grad in grads
        )
        assert counted.launches == 1
        assert counted.blocks == 2 * multiprocessors
        assert counted.bytes_loaded == 16 * packs * reads, (op, factors, norm)
        assert counted.bytes_stored == 16 * packs * writes, (op, factors, norm)


# Loads of 16 bytes for each element's share of a thread, of the list or of tensors used together.
# All are issued before the first use.
LOADS = {**dict.fromkeys(CALLS, 1), "cast_": 2, "adam_": 4, "sgd_": 3}


@pytest.mark.fake_cuda
@pytest.mark.parametrize("op", CALLS)
def test_warps_read_tiny_tensors_side_by_side(op: str) -> None:
    """Warps read tiny tensors side by side: 4,000 tensors of 100 elements.

    Each tensor keeps one warp busy, on 132 multiprocessors. A block of lists has 16 tensors and 16
    warps, one of sgd_ 8 of both. One of adam_ has 11 tensors and 8 warps.
    """
    function, values = call(op, 4000, 100)
    for step in values.get("steps", ()):
        step.fill_(7.0)
    with schedule(3, 132):
        counted = cost(function, **values)
    assert counted.most_loads == LOADS[op] * (2 if op == "adam_" else 1)


@pytest.mark.fake_cuda
@pytest.mark.parametrize("op", CALLS[:3])
def test_blocks_share_what_is_no_multiple_of_them(op: str) -> None:
    """Four blocks share 5 chunks of 8 loads a thread: 10 loads each, not 16."""
    function, values = call(op, 1, 5 * 16384)
    with schedule(3, 2):
        counted = cost(function, **values)
    assert (counted.blocks, counted.most_loads) == (4, 10)


@pytest.mark.fake_cuda
@pytest.mark.parametrize("op", OPS)
def test_an_update_moves_each_tensor_once(op: str) -> None:
    """An update reads weight, gradient and moments, writes weight and moments, or nothing at all.

    It moves nothing after an overflow.
    """
    moments, size = {"adam_": 2, "sgd_": 1}[op], 4 * (3 * 16384 - 8)
    for found_inf in (0.0, 1.0):
        values = update(ON_CUDA, op, [(size // 4,)], found_inf=ON_CUDA.scalar(found_inf))
        values["copies"] = [torch.empty_like(p, dtype=torch.half) for p in values["params"]]
        counted = cost(getattr(ops, op), **values)
        assert counted.launches == 1
        assert counted.bytes_loaded == (2 + moments) * size * (found_inf == 0)
        assert counted.bytes_stored == (1 + moments + 0.5) * size * (found_inf == 0)


@pytest.mark.fake_cuda
def test_a_fault_is_the_error_of_the_op() -> None:
    """A fault is the error of the op and leaves the next launch alone."""
    grads, found_inf = [torch.ones(9, device=CUDA)], ON_CUDA.scalar(0.0)
    error = r"amp_ext::check_finite: .*check_finite_kernel: its grid"
    with schedule(0, multiprocessors=0), pytest.raises(RuntimeError, match=error):
        ops.check_finite(grads, found_inf)
    ops.check_finite(grads, found_inf)


@native
def test_more_than_2_to_the_31_elements_are_written(executor: Executor) -> None:
    grad = torch.ones(2**31 + 5, dtype=torch.bfloat16, device=executor.device)
    output = torch.zeros(2**31 + 5, dtype=torch.float16, device=executor.device)
    found_inf = executor.scalar(0.0)
    norm = executor.ops.grad_norm([grad], found_inf)
    assert (norm.item(), found_inf.item()) == (executor.scalar((2**31 + 5) ** 0.5).item(), 0.0)
    grad[-1] = math.inf
    for op, arguments in (("check_finite", ()), ("grad_norm", ()), ("unscale_", (0.5,))):
        found_inf.zero_()
        getattr(executor.ops, op)([grad], found_inf, *map(executor.scalar, arguments))
        assert found_inf.item() == 1.0
    assert grad[:-1].max().item() == grad[:-1].min().item() == 0.5
    executor.ops.cast_([output], [grad])
    assert output[-1].item() == math.inf
    assert output[:-1].max().item() == output[:-1].min().item() == 0.5
