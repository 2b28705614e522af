"""Test amp_ext::gemm under autograd: needed products only, versions, equal bits, tracing."""

from __future__ import annotations

import contextlib

import pytest
import torch

from amp_ext import ops
from autocast_cases import Seen
from cases import FLOATS, assert_same, normal, unwritten
from executors import Executor, against_oracle
from gemm_cases import FORMS, LARGE, SMALL, Form, cast, gradients

FP16, BF16, FP32, FP64 = FLOATS

NAMES = ("a", "b", "c", "bias")
SUBSETS = [*((name,) for name in NAMES), ("a", "b"), ("b", "c", "bias"), NAMES]


@against_oracle
@pytest.mark.parametrize("form", [FORMS["all"], FORMS["sum"]], ids=["all", "sum"])
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_only_what_is_wanted_is_computed(
    executor: Executor, wanted: tuple[str, ...], form: Form
) -> None:
    leaves = form.leaves(LARGE, lambda shape: normal(shape, FP16, executor.device))
    out = ops.gemm(**leaves, **form.options)
    grad = normal(tuple(out.shape), FP16, executor.device)
    expected = torch.autograd.grad(out, list(leaves.values()), grad)

    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted)
    out = ops.gemm(**leaves, **form.options)
    with Seen() as seen:
        out.backward(grad)
    assert seen.gemms + seen.torchs <= len({"a", "b"} & set(wanted))
    for (name, leaf), value in zip(leaves.items(), expected, strict=True):
        if name in wanted:
            assert_same(leaf.grad, value)
        else:
            assert leaf.grad is None


@against_oracle
def test_gemm_accumulate_is_not_differentiable(executor: Executor) -> None:
    """A tensor that requires a gradient is an error unless the call is under no_grad."""
    for index in range(3):
        tensors = [torch.ones(2, 2, device=executor.device) for _ in range(3)]
        tensors[index].requires_grad_()
        error = pytest.raises(RuntimeError, match="gemm_accumulate_: is not differentiable")
        with unwritten(tensors), error:
            ops.gemm_accumulate_(*tensors)
        with torch.no_grad():
            ops.gemm_accumulate_(*tensors)
        assert (tensors[0] == 3.0).all()


@against_oracle
@pytest.mark.parametrize("changed", [*NAMES, "out"])
@pytest.mark.parametrize("wanted", [("a",), ("c", "bias"), NAMES], ids="-".join)
def test_in_place_changes_before_backward(
    executor: Executor, wanted: tuple[str, ...], changed: str
) -> None:
    """An in-place change before backward is an error if the gradient needs the old value."""
    leaves = FORMS["all"].leaves(SMALL, lambda shape: normal(shape, FP16, executor.device))
    tensors = {name: leaf.requires_grad_(name in wanted) for name, leaf in leaves.items()}
    tensors["out"] = ops.gemm(**leaves, **FORMS["all"].options)
    with torch.no_grad():
        tensors[changed].mul_(2.0)
    needed = {"a": "b" in wanted, "b": "a" in wanted}
    error = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with error if needed.get(changed) else contextlib.nullcontext():
        tensors["out"].sum().backward()


@against_oracle
@pytest.mark.parametrize("name", ["plain", "all", "batch", "shared-a", "sum", "c-row", "c-scalar"])
def test_compiles(executor: Executor, name: str) -> None:
    """Forward and backward compile without a graph break, with the same bits."""
    form = FORMS[name]
    leaves = form.leaves(SMALL, lambda shape: normal(shape, FP32, executor.device))
    leaves = cast(leaves, (FP16, FP32, FP32, FP32))
    torch._dynamo.reset()
    compiled = torch.compile(ops.gemm, backend="aot_eager", fullgraph=True)
    grad = torch.ones_like(ops.gemm(**leaves, **form.options))
    assert_same(compiled(**leaves, **form.options), ops.gemm(**leaves, **form.options))
    expected = gradients(ops.gemm, leaves, grad, **form.options)
    for tensor, actual in gradients(compiled, leaves, grad, **form.options).items():
        assert_same(actual, expected[tensor])
    torch.library.opcheck(torch.ops.amp_ext.gemm.default, (), leaves | form.options)
