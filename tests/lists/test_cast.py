"""Test amp_ext::cast_: the bits of torch.Tensor.copy_, and the memory that it touches."""

import itertools
import math
import re
from collections.abc import Callable

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
    copies,
    patterns,
    random,
    surroundings,
    unwritten,
    whole_and_view,
)
from executors import CUDA, Executor, against_oracle, every_executor
from fake_cuda.recorder import cost, schedule

FP16, BF16, FP32, FP64 = FLOATS
EVERY_PAIR = list(itertools.product(FLOATS, repeat=2))
"""Input, output."""

every_pair = pytest.mark.parametrize(
    ("dtype", "output_dtype"), EVERY_PAIR, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
PAIRS_OF_EACH_KIND = [(FP32, FP16), (BF16, FP32), (FP64, FP16), (FP16, BF16), (FP32, FP32)]


def check(executor: Executor, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Compare the op's writes to the outputs, and to the memory around them, with torch's."""
    expected = copies(outputs)
    for output, source in zip(expected, inputs, strict=True):
        output.copy_(source)
    with unwritten(inputs):
        executor.ops.cast_(outputs, inputs)
    assert_all_same(map(surroundings, outputs), map(surroundings, expected))


# ---- values ------------------------------------------------------------------------------------


@every_executor
@every_pair
def test_bit_patterns_as_torch(
    executor: Executor, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    """Bit patterns are cast as by torch, also in tensors that are too short for vectors."""
    source = patterns(dtype, executor.device)
    for sources in ([source], executor.some(source.split(7)[::256], 100)):
        outputs = [torch.full_like(values, 7.0, dtype=output_dtype) for values in sources]
        check(executor, outputs, sources)
        if dtype == output_dtype:
            assert torch.equal(*(bits(torch.cat(x)) for x in (outputs, sources))), "NaN payloads"


@every_executor
def test_rounding(executor: Executor) -> None:
    """A value between two neighbours is rounded once, to the nearer one; a tie to the even one."""
    for dtype, output_dtype, value, expected in (
        (FP32, FP16, 1 + 2.0**-11, 1.0),  # half-way: to the even one
        (FP32, FP16, -65520.0, -math.inf),  # half-way to 2**16
        (FP32, FP16, 2.0**-25, 0.0),
        (FP32, BF16, 1 + 2.0**-8, 1.0),
        (FP64, FP32, 1 + 2.0**-24, 1.0),
        (FP64, FP32, 3 * 2.0**-150, 2.0**-148),
        (FP64, FP16, 1 + 2.0**-11 + 2.0**-40, 1.0),  # 1 + 2**-11 in fp32, then half-way
    ):
        for size in (1, 37):
            source = torch.full((size,), value, dtype=dtype, device=executor.device)
            output = torch.empty(size, dtype=output_dtype, device=executor.device)
            executor.ops.cast_([output], [source])
            assert_same(output, torch.full_like(output, expected))


# ---- tensors of torch --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.inference_mode()(Tensor.clone)])
def test_parameters_and_inference_tensors(make: Callable[[Tensor], Tensor]) -> None:
    """Parameters and inference tensors, without a version counter, are cast and written."""
    weight, master = make(torch.zeros(4, dtype=FP16)), make(torch.ones(4))
    with torch.no_grad():
        ops.cast_([weight], [master])
    assert weight.is_leaf and weight.tolist() == [1.0] * 4


# ---- alignment and layouts ---------------------------------------------------------------------


@against_oracle
@pytest.mark.parametrize("offsets", [(0, 0), (3, 3), (1, 0), (2, 5)], ids=str)
@pytest.mark.parametrize("dtypes", PAIRS_OF_EACH_KIND, ids=str)
def test_every_edge(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], offsets: tuple[int, int]
) -> None:
    """Sizes around a pack and a chunk are cast, at each offset of input and output."""
    sizes = [*range(1, 25), *SIZES]
    inputs, outputs = (
        [random((size + 16,), dtype, executor.device)[first : first + size] for size in sizes]
        for dtype, first in zip(dtypes, offsets, strict=True)
    )
    check(executor, outputs, inputs)


@against_oracle
@pytest.mark.parametrize("layout", LAYOUTS | OVERLAPPING)
def test_layouts(executor: Executor, layout: str) -> None:
    """A cast takes every layout of both tensors, or of one; inputs may share memory."""
    for dtypes in PAIRS_OF_EACH_KIND:
        source, output = (whole_and_view(layout, d, executor.device)[1] for d in dtypes)
        check(executor, [output.clone().contiguous()], [source])
        if layout not in OVERLAPPING:
            check(executor, [output], [source])
            check(executor, [output], [source.clone().contiguous().neg()])


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
    text = "amp_ext::cast_: outputs[{1}] and inputs[{0}] overlap in memory, expected "
    with unwritten([MEMORY]), pytest.raises(RuntimeError, match=re.escape(text.format(*named))):
        ops.cast_(outputs, inputs)


def test_input_beside_what_is_written() -> None:
    """An input may lie beside outputs, or between two outputs while one spans the other."""
    memory = torch.arange(64.0)
    rows = memory[:32].view(4, 8)
    outputs = [rows[:, :2], rows[:, 2:5], memory[40:44], memory[48:52]]
    inputs = [torch.zeros(4, 2), torch.ones(4, 3), memory[44:48], memory[32:36]]
    ops.cast_(outputs, inputs)
    assert rows[:, :6].tolist() == [[0, 0, 1, 1, 1, float(first)] for first in (5, 13, 21, 29)]
    copied = (range(32, 40), range(44, 48), range(44, 48), range(32, 36), range(52, 64))
    assert memory[32:].tolist() == [*itertools.chain(*copied)]


# ---- costs of a launch -------------------------------------------------------------------------


@pytest.mark.fake_cuda
@pytest.mark.parametrize("offset", [0, 3])
@every_pair
def test_reads_and_writes_each_pack_once(
    dtype: torch.dtype, output_dtype: torch.dtype, offset: int
) -> None:
    """One launch reads and writes each pack once.

    A pack is a store of 16 bytes; its load is narrower if the input's elements are, and is not
    counted then. Elements outside of a whole pack go one by one, and so does a pair of tensors with
    sides that are never aligned together.
    """
    # Elements of 4 blocks: each block visits 14 of the 8 * 7 pieces of 2048 elements, in 7 chunks.
    spans = [16384, 12288, 4096, 16384, 8192, 8192, 16384 - 8, 40]
    sizes = [sum(spans[:-1]), spans[-1]]

    def some(size: int, dtype: torch.dtype, offset: int) -> Tensor:
        return torch.ones(size + offset, dtype=dtype, device=CUDA)[offset:]

    inputs = [some(size, dtype, offset) for size in sizes]
    outputs = [some(size, output_dtype, offset) for size in sizes]
    step = 16 // output_dtype.itemsize
    packed = sum((span - -offset % step) // step * step for span in spans)
    inputs.append(some(32, dtype, 1))
    outputs.append(some(32, output_dtype, 0))
    with schedule(3, 2):
        counted = cost(ops.cast_, outputs, inputs)
    assert counted.launches == 1
    assert counted.blocks == 4
    is_counted = dtype.itemsize >= output_dtype.itemsize
    assert counted.bytes_loaded == packed * dtype.itemsize * is_counted
    assert counted.bytes_stored == packed * output_dtype.itemsize
