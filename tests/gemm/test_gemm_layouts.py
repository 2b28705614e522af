"""gemm takes operands of any layout: permuted, sliced, expanded, with dimensions of size 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import amp_ext
from amp_ext import reference

LOW = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
SIZES = st.sampled_from([0, 1, 1, 2, 5, 33])


@st.composite
def tensors(draw: st.DrawFn, shape: Sequence[int]) -> Tensor:
    """Small integers, whose products are added up exactly, in a layout of any kind."""
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.empty(())
    kinds = st.sampled_from(["dense", "dense", "sliced", "expanded"])
    ways = [draw(kinds) for _ in order]
    stored = [shape[d] + 2 * (way == "sliced") for d, way in zip(order, ways, strict=True)]
    stored = [1 if way == "expanded" else size for size, way in zip(stored, ways, strict=True)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(-3, 4, stored, generator=generator).to(draw(LOW))
    for at, (d, way) in enumerate(zip(order, ways, strict=True)):
        if way == "sliced":
            tensor = tensor.narrow(at, 1, shape[d])
        elif way == "expanded":
            tensor = tensor.expand(*[shape[d] if i == at else -1 for i in range(len(shape))])
    return tensor.permute([order.index(d) for d in range(len(shape))])


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.lists(st.sampled_from([1, 1, 2, 3]), max_size=3))
    m, n, k = (draw(SIZES) for _ in range(3))
    call = {name: draw(st.booleans()) for name in ("trans_a", "trans_b")}
    a, b = ([] if draw(st.integers(0, 4)) == 0 else batch for _ in range(2))
    call["a"] = draw(tensors([*a, *((k, m) if call["trans_a"] else (m, k))]))
    call["b"] = draw(tensors([*b, *((n, k) if call["trans_b"] else (k, n))]))
    call["sum_batch"] = bool(a and b) and draw(st.booleans())
    out = [*([] if call["sum_batch"] else a or b), m, n]
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([size, 1])) for size in out]
        call["c"] = draw(tensors(sizes[draw(st.integers(0, len(out))) :]))
        call["beta"] = draw(st.sampled_from([0.0, 1.0, -2.0]))
    if draw(st.booleans()):
        call["bias"] = draw(tensors([n]))
    call["activation"] = draw(st.sampled_from(["none", "relu"]))
    return call


@settings(max_examples=150, deadline=None)
@given(calls())
def test_any_layout(call: dict[str, Any]) -> None:
    actual = amp_ext.ops.gemm(**call, out_dtype=torch.float32)
    expected = reference.gemm(**call, out_dtype=torch.float32)
    assert actual.shape == expected.shape
    assert actual.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_attention_of_one_head(dtype: torch.dtype) -> None:
    """[batch, 1, time, width], whose strides of the size 1 mean nothing."""
    q, k = (torch.randint(-3, 4, (3, 16, 1, 8)).to(dtype).transpose(1, 2) for _ in range(2))
    assert amp_ext.ops.gemm(q, k, trans_b=True).equal(reference.gemm(q, k, trans_b=True))
