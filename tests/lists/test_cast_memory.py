"""Test memory of amp_ext::cast_: alignment, layouts, overlaps, and moved bytes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import (
    FLOATS,
    LAYOUTS,
    OVERLAPPING,
    SIZES,
    assert_all_same,
    assert_same,
    bits,
    random,
    unwritten,
    whole_and_view,
)
from cast_cases import FP16, FP32, FP64, PAIRS_OF_EACH_KIND, check, every_pair, pair, patterns
from executors import Executor, against_oracle, every_executor
from ptx_backend.backend import Ptx, Schedule

CPU = torch.device("cpu")

# ---- alignment and layouts ---------------------------------------------------------------------

OFFSETS = [(0, 0), (8, 8), (3, 3), (1, 0), (0, 1), (2, 5)]
"""Where output and input begin, in elements behind an aligned address."""


@against_oracle
@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda o: f"at-{o[0]}-from-{o[1]}")
@pytest.mark.parametrize(("dtype", "output_dtype"), PAIRS_OF_EACH_KIND, ids=str)
def test_every_edge(
    executor: Executor, dtype: torch.dtype, output_dtype: torch.dtype, offsets: tuple[int, int]
) -> None:
    """Sizes around a pack and a chunk are cast; memory around the outputs stays unchanged."""
    outputs, inputs = [], []
    for size in (*range(1, 25), *SIZES):
        output, source = pair(executor, size + 16, dtype, output_dtype)
        outputs.append(output[offsets[0] : offsets[0] + size])
        inputs.append(source[offsets[1] : offsets[1] + size])
    check(executor, outputs, inputs)


@against_oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(executor: Executor, layout: str) -> None:
    """A cast takes every layout of both tensors, or of one of them."""
    for dtypes in PAIRS_OF_EACH_KIND:
        source = whole_and_view(layout, dtypes[0], executor.device)[1]
        output = whole_and_view(layout, dtypes[1], executor.device)[1]
        plain_source, plain_output = source.clone(), output.clone()
        plain_source, plain_output = plain_source.contiguous(), plain_output.contiguous()
        for to, of in ((output, source), (plain_output, source), (output, plain_source.neg())):
            check(executor, [to], [of])


@against_oracle
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_inputs_whose_elements_share_memory(executor: Executor, layout: str) -> None:
    source = whole_and_view(layout, FP32, executor.device)[1]
    output = torch.empty(source.shape, dtype=FP16, device=executor.device)
    check(executor, [output], [source])


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_as_its_own_input(executor: Executor, dtype: torch.dtype) -> None:
    """A tensor may be its own input: nothing is written, and other tensors may read it."""
    own, other = patterns(dtype, executor.device), patterns(FP32, executor.device)
    first, copy = own[:100], torch.empty(100, dtype=FP64, device=executor.device)
    before = bits(own).clone()
    output = torch.empty_like(other)
    executor.ops.cast_([own, output, copy], [own.view_as(own), other, first])
    assert torch.equal(bits(own), before), "NaN payloads count here"
    assert torch.equal(bits(output), bits(other))
    assert_same(copy, first.double())


# ---- overlaps ----------------------------------------------------------------------------------

MEMORY = torch.arange(64.0)
ROWS = MEMORY.view(8, 8)


@pytest.mark.parametrize(
    ("outputs", "inputs", "named"),
    [
        ([MEMORY.half()[:8], MEMORY[1:9]], [MEMORY[20:28], MEMORY[:8]], (1, 1)),
        ([MEMORY[:8].view(torch.float16)[:8]], [MEMORY[:8]], (0, 0)),
        ([ROWS], [ROWS.t()], (0, 0)),
        ([ROWS[:, :4]], [ROWS[:, 4:]], (0, 0)),
        ([MEMORY[:8], MEMORY[8:16]], [MEMORY[8:16], MEMORY[16:24]], (0, 1)),
        ([MEMORY[:8], torch.zeros(())], [torch.ones(8), MEMORY[7]], (1, 0)),
        ([MEMORY[5:9:2], MEMORY[:40:2]], [MEMORY[50:52], MEMORY[20:40]], (1, 1)),
        ([MEMORY[5:9:2], MEMORY[:40:2]], [MEMORY[20:22], torch.ones(20)], (0, 1)),
        ([MEMORY[:16:2], MEMORY[5:9:2]], [MEMORY[:16:2], torch.ones(2)], (0, 1)),
    ],
)
def test_input_that_is_written(
    outputs: list[Tensor], inputs: list[Tensor], named: tuple[int, int]
) -> None:
    text = "amp_ext::cast_: inputs[{}] and outputs[{}] overlap in memory, expected "
    with unwritten([MEMORY]), pytest.raises(RuntimeError, match=re.escape(text.format(*named))):
        ops.cast_(outputs, inputs)


@pytest.mark.parametrize("reverse", [False, True])
def test_input_beside_what_is_written(reverse: bool) -> None:
    """An input may lie beside outputs, or between two outputs while one spans the other."""
    memory = torch.arange(64.0)
    rows = memory[:32].view(4, 8)
    outputs = [rows[:, :2], rows[:, 2:5], memory[40:44], memory[48:52]]
    inputs = [torch.zeros(4, 2), torch.ones(4, 3), memory[44:48], memory[32:36]]
    order = slice(None, None, -1 if reverse else 1)
    ops.cast_(outputs[order], inputs[order])
    assert rows[:, :6].tolist() == [[0, 0, 1, 1, 1, float(first)] for first in (5, 13, 21, 29)]
    assert memory[32:].tolist() == [
        *range(32, 40),
        *range(44, 48),
        *range(44, 48),
        *range(32, 36),
        *range(52, 64),
    ]


# ---- costs of a launch -------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.parametrize("offset", [0, 3])
@every_pair
def test_ptx_reads_and_writes_each_pack_once(
    ptx: Ptx, dtype: torch.dtype, output_dtype: torch.dtype, offset: int
) -> None:
    """One launch reads and writes each pack once.

    Elements outside of a whole pack on both sides go one by one, and so does a pair of tensors with
    sides that are never aligned together.
    """
    # Elements of 4 blocks: each block visits 14 of the 8 * 7 pieces of 2048 elements, in 7 chunks.
    spans = [16384, 12288, 4096, 16384, 8192, 8192, 16384 - 8, 40]
    sizes = [sum(spans[:-1]), spans[-1]]
    inputs = [torch.ones(size + offset, dtype=dtype)[offset:] for size in sizes]
    outputs = [torch.ones(size + offset, dtype=output_dtype)[offset:] for size in sizes]
    step = 16 // min(dtype.itemsize, output_dtype.itemsize)
    packed = sum((span - -offset % step) // step * step for span in spans)
    inputs.append(torch.ones(33, dtype=dtype)[1:])
    outputs.append(torch.ones(32, dtype=output_dtype))
    ptx.pin(Schedule(3, 2))
    counted = ptx.cost(ops.cast_, outputs, inputs)
    assert counted.launches == 1
    assert counted.blocks == 4
    assert counted.bytes_loaded == packed * dtype.itemsize
    assert counted.bytes_stored == packed * output_dtype.itemsize


@pytest.mark.ptx
@pytest.mark.parametrize("count", [0, 1, 2000])
def test_one_ptx_launch_for_any_list(ptx: Ptx, count: int) -> None:
    inputs = [random((1 + 13 * i % 101,), FLOATS[i % 4], CPU) for i in range(count)]
    outputs = [torch.empty_like(source, dtype=torch.float16) for source in inputs]
    assert ptx.cost(ops.cast_, outputs, inputs).launches == min(count, 1)


@pytest.mark.ptx
@pytest.mark.parametrize("count", [30, 1100], ids=["parameters", "table"])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_in_every_ptx_schedule(ptx: Ptx, seed: int, count: int) -> None:
    inputs = [random((1 + 13 * i % 101,), FLOATS[i % 4], CPU) for i in range(count)]
    inputs.append(random((70_001,), FP32, CPU))
    outputs = [torch.empty_like(t, dtype=FLOATS[i // 4 % 4]) for i, t in enumerate(inputs)]
    expected = [source.to(output.dtype) for source, output in zip(inputs, outputs, strict=True)]
    ptx.pin(Schedule(seed, (1, 4)[seed // 4]))
    ops.cast_(outputs, inputs)
    assert_all_same(outputs, expected)
