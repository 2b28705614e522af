"""Test amp_ext::cast_: every pair of dtypes has the bits of torch.Tensor.copy_."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    assert_all_same,
    assert_same,
    bits,
    random,
    threads,
    whole_and_view,
)
from cast_cases import BF16, EVERY_PAIR, FP16, FP32, FP64, check, every_pair, pair, patterns
from executors import Executor, against_oracle, every_executor, native

# ---- values ------------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("wide", [FP32], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("length", [2**16, 7], ids=["whole", "short-tensors"])
def test_all_16_bit_patterns_there_and_back(
    executor: Executor, dtype: torch.dtype, wide: torch.dtype, length: int
) -> None:
    """All 16-bit patterns survive a cast there and back, also in short tensors.

    Widening is exact; short tensors are not vectorised.
    """
    values = executor.some(patterns(dtype, executor.device).split(length), 100)
    widened = [torch.empty_like(value, dtype=wide) for value in values]
    back = [torch.empty_like(value) for value in values]
    executor.ops.cast_(widened, values)
    assert_same(torch.cat(widened), torch.cat(values).to(wide))
    executor.ops.cast_(back, widened)
    assert_same(torch.cat(back), torch.cat(values))


@every_executor
@every_pair
def test_bit_patterns_as_torch(
    executor: Executor, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    source = patterns(dtype, executor.device)
    output = random(tuple(source.shape), output_dtype, executor.device)
    check(executor, [output], [source])
    if dtype == output_dtype:
        assert torch.equal(bits(output), bits(source)), "NaN payloads count here"


@every_executor
@pytest.mark.parametrize(
    ("dtype", "output_dtype", "value", "expected"),
    [
        (FP32, FP16, 1 + 2.0**-11, 1.0),  # half-way: to the even one
        (FP32, FP16, 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (FP32, FP16, 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-10),
        (FP32, FP16, -65519.996, -65504.0),
        (FP32, FP16, -65520.0, -math.inf),  # half-way to 2**16
        (FP32, FP16, 2.0**-24, 2.0**-24),  # the smallest subnormal
        (FP32, FP16, 2.0**-25, 0.0),
        (FP32, FP16, 3 * 2.0**-25, 2.0**-23),
        (FP32, FP16, -(2.0**-149), -0.0),
        (FP32, BF16, 1 + 2.0**-8, 1.0),
        (FP32, BF16, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (FP32, BF16, 3.402823466e38, math.inf),
        (FP32, BF16, 3 * 2.0**-134, 2.0**-132),
        (FP16, BF16, 65504.0, 65536.0),
        (BF16, FP16, 2.0**100, math.inf),
        (BF16, FP32, 2.0**-133, 2.0**-133),
        (FP64, FP32, 1 + 2.0**-24, 1.0),
        (FP64, FP32, 1 + 2.0**-24 + 2.0**-52, 1 + 2.0**-23),
        (FP64, FP32, 3 * 2.0**-150, 2.0**-148),
        (FP64, FP32, 1e39, math.inf),
        (FP64, FP16, 1 + 2.0**-11 + 2.0**-40, 1.0),  # 1 + 2**-11 in fp32, then half-way
        (FP64, BF16, 1 + 2.0**-8 + 2.0**-40, 1.0),
        (FP16, FP64, 2.0**-24, 2.0**-24),
    ],
    ids=str,
)
def test_rounding(
    executor: Executor, dtype: torch.dtype, output_dtype: torch.dtype, value: float, expected: float
) -> None:
    for size in (1, 37):
        source = torch.full((size,), value, dtype=dtype, device=executor.device)
        output = torch.empty(size, dtype=output_dtype, device=executor.device)
        executor.ops.cast_([output], [source])
        assert_same(output, torch.full_like(output, expected))


# ---- lists -------------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("count", [3, 1008, 1009, 2000])
def test_lists_of_mixed_dtypes(executor: Executor, count: int) -> None:
    """Lists of mixed dtypes are cast: 1008 pairs fit a kernel's parameters, more do not."""
    pairs = [
        pair(executor, 1 + 7 * i % 97, *EVERY_PAIR[i % 16]) for i in range(executor.length(count))
    ]
    outputs, inputs = map(list, zip(*pairs, strict=True))
    check(executor, outputs, inputs)


@against_oracle
def test_every_layout_in_one_list(executor: Executor) -> None:
    places = [(name, *dtypes) for name in LAYOUTS for dtypes in EVERY_PAIR]
    outputs = [whole_and_view(name, dtype, executor.device)[1] for name, _, dtype in places]
    inputs = [whole_and_view(name, dtype, executor.device)[1] for name, dtype, _ in places]
    check(executor, outputs, inputs)


@every_executor
def test_empty_tensors_anywhere(executor: Executor) -> None:
    empty = torch.empty(0, 4, device=executor.device)
    output, source = pair(executor, 5, FP32, FP16)
    executor.ops.cast_([empty, empty.half()], [empty, empty])
    check(
        executor,
        [empty.half(), output, empty.bfloat16(), empty, empty],
        [empty, source, empty, empty.double(), empty],
    )


def results(executor: Executor, inputs: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    outputs = [torch.empty_like(i, dtype=d) for i, d in zip(inputs, dtypes, strict=True)]
    executor.ops.cast_(outputs, inputs)
    return outputs


@against_oracle
def test_the_same_in_every_run_and_for_any_number_of_threads(executor: Executor) -> None:
    """Casts are equal in every run for any number of threads, with torch's bits."""
    made = [random((size,), dtype, executor.device) for size in SIZES for dtype in FLOATS]
    inputs = [*made, random((1_100_000,), FP32, executor.device)]
    dtypes = [FLOATS[i // 4 % 4] for i in range(len(inputs))]
    expected = [i.to(d) for i, d in zip(inputs, dtypes, strict=True)]
    for run in executor.some(range(4), 2):
        with threads(1 + run % 2):
            assert_all_same(results(executor, inputs, dtypes), expected)


# ---- who looks on ------------------------------------------------------------------------------


def test_tensors_that_torch_materialises() -> None:
    """A cast takes tensors without materialised values: negative views and zero tensors."""
    sources = [torch._neg_view(torch.ones(3)), torch._efficientzerotensor(3)]
    outputs = [torch.full((3,), 7.0, dtype=FP16) for _ in sources]
    ops.cast_(outputs, sources)
    assert [output.tolist() for output in outputs] == [3 * [-1.0], 3 * [0.0]]


@pytest.mark.parametrize("step", [1, 2], ids=["dense", "with holes"])
def test_inference_tensors(step: int) -> None:
    """Inference tensors, without a version counter, are written in and out of inference mode."""
    with torch.inference_mode():
        weight = torch.zeros(8, dtype=FP16)[::step]
    ops.cast_([weight], [torch.ones(8 // step)])
    assert weight.tolist() == [1.0] * (8 // step)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_parameters(sequence: type) -> None:
    """Parameters as outputs are an error while autograd records: it would miss the write."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=FP16))
    master = torch.nn.Parameter(torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match=r"outputs\[0\] requires grad.*expected torch.no_grad"):
        ops.cast_(sequence([weight]), [master])
    assert weight.tolist() == [1.0, 1.0, 1.0]
    with torch.no_grad():
        ops.cast_(sequence([weight]), [master])
    assert weight.is_leaf and weight.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.full
@native
def test_more_than_2_to_the_31_elements(executor: Executor) -> None:
    source = torch.ones(2**31 + 5, dtype=BF16, device=executor.device)
    source[-1] = 3.0
    output = torch.zeros(2**31 + 5, dtype=FP16, device=executor.device)
    executor.ops.cast_([output], [source])
    assert output[-1].item() == 3.0
    assert output[:-1].max().item() == output[:-1].min().item() == 1.0
