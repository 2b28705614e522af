"""Test first and second gradients of amp_ext::gemm: values, needed products, versions, tracing."""

import contextlib
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import reference
from amp_ext import ops
from autocast_cases import Seen
from cases import FLOATS, PAIRS, assert_equal, assert_same, integers, normal, unwritten
from executors import Executor, against_oracle, every_executor
from gemm_cases import FORMS, LARGE, SMALL, Form, Leaves, cast, doubles, gradients

FP16, BF16, FP32, FP64 = FLOATS

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_executor
@every_form
def test_exact_gradients(executor: Executor, form: Form) -> None:
    """Gradients of integers are exact: each is rounded once, to the dtype of its tensor.

    They have more digits than 16 bits hold. Gradients of empty sums, in the last cases, are zero.
    """
    c_dtypes, out_dtypes = itertools.cycle(FLOATS), itertools.cycle((FP32, None, BF16, FP64, FP16))
    empty = [*16 * [()], *"mknx"]
    for dtypes, c_dtype, out_dtype, zeros in zip(
        2 * PAIRS, c_dtypes, out_dtypes, empty, strict=False
    ):
        sizes = SMALL | dict.fromkeys(zeros, 0)
        leaves = form.leaves(sizes, lambda shape: integers(shape, FP64, executor.device, limit=63))
        leaves = cast(leaves, (*dtypes, c_dtype, c_dtype))
        options = form.options | {"out_dtype": out_dtype}
        grad = executor.ops.gemm(**leaves, **options).detach()
        grad = integers(tuple(grad.shape), grad.dtype, executor.device, limit=2000)
        exact = gradients(reference.gemm, doubles(leaves), grad.double(), **form.options)
        for name, actual in gradients(executor.ops.gemm, leaves, grad, **options).items():
            assert (actual.dtype, actual.shape) == (leaves[name].dtype, leaves[name].shape)
            assert_equal(actual, exact[name])


@against_oracle
@pytest.mark.parametrize(("dtype", "grad_dtype"), [(FP16, FP32), (BF16, FP32), (FP16, None)])
def test_fp32_gradients_of_16_bit_leaves(
    executor: Executor, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> None:
    """A leaf whose grad_dtype is FP32 or None gets a gradient that 16 bits cannot hold."""
    shapes = {"a": (65, 7), "b": (5, 7), "bias": (5,), "c": (65, 1)}
    leaves = {name: integers(s, dtype, executor.device, limit=200) for name, s in shapes.items()}
    for leaf in leaves.values():
        leaf.requires_grad_().grad_dtype = grad_dtype
    grad = integers((65, 5), dtype, executor.device, limit=200) * 200
    options = {"trans_b": True, "alpha": 0.5, "beta": 2.0}
    exact = gradients(reference.gemm, doubles(leaves), grad.double(), **options)
    found = gradients(executor.ops.gemm, leaves, grad, **options)
    for name, actual in found.items():
        assert actual.dtype == FP32
        assert actual.double().equal(exact[name])
        assert actual.abs().max() > 65504


@every_executor
@every_form
@pytest.mark.parametrize("dtypes", [(FP16, FP32), (FP16, FP16)], ids=str)
def test_gradient_penalty(
    executor: Executor, dtypes: tuple[torch.dtype, torch.dtype], form: Form
) -> None:
    """A loss with first gradients has the right gradient, in numbers that FP16 represents."""

    def second(run: Callable[..., Tensor], leaves: Leaves) -> tuple[Tensor, ...]:
        tensors = list(leaves.values())
        out = run(**leaves, **form.options)
        unused = {"allow_unused": True, "materialize_grads": True}
        loss = out.double().square().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True, **unused)
        assert first[0].requires_grad
        penalty = sum(grad.double().square().sum() for grad in first)
        return torch.autograd.grad(penalty, tensors, **unused)

    leaves = form.leaves(SMALL, lambda shape: integers(shape, FP64, executor.device, limit=1))
    leaves = cast(leaves, (*dtypes, FP32, FP32))
    actual, exact = second(executor.ops.gemm, leaves), second(reference.gemm, doubles(leaves))
    for mine, leaf, expected in zip(actual, leaves.values(), exact, strict=True):
        assert mine.dtype == leaf.dtype
        assert_equal(mine, expected)


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


@pytest.mark.parametrize("name", ["a", "b"])
def test_backward_frees_operands(name: str) -> None:
    operands = {key: torch.ones(2, 2, requires_grad=True) * 1 for key in "ab"}
    out, operand = ops.gemm(**operands), weakref.ref(operands[name])
    del operands
    assert operand() is not None
    out.sum().backward()
    assert operand() is None


def test_gradient_of_a_bias_of_one_element() -> None:
    """Threads of a sum to one element do not round their parts to the bias's dtype."""
    a, b = torch.ones(1 << 16, 1, dtype=BF16), torch.ones(1, 1, dtype=BF16)
    bias = torch.zeros(1, dtype=BF16, requires_grad=True)
    grad = torch.full((1 << 16, 1), -0.0078125, dtype=BF16)
    grad[: 1 << 15], grad[0] = 0.0078125, 1.0
    ops.gemm(a, b, bias=bias).backward(grad)
    assert bias.grad.item() == 1 - 0.0078125


@against_oracle
def test_gemm_accumulate_is_not_differentiable(executor: Executor) -> None:
    """A tensor that requires a gradient is an error unless the call is under no_grad."""
    for index in range(3):
        tensors = [torch.ones(2, 2, device=executor.device) for _ in range(3)]
        tensors[index].requires_grad_()
        error = pytest.raises(RuntimeError, match=r"gemm_accumulate_: .* is not differentiable")
        with unwritten(tensors), error:
            ops.gemm_accumulate_(*tensors)
        with torch.no_grad():
            ops.gemm_accumulate_(*tensors)
        assert (tensors[0] == 3.0).all()


def test_forward_mode_is_an_error() -> None:
    """A tangent is not lost in silence."""
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones(2, 2))
        with pytest.raises(NotImplementedError, match="gemm: forward-mode"):
            ops.gemm(dual, b)
        with pytest.raises(NotImplementedError, match="gemm_accumulate_: forward-mode"):
            ops.gemm_accumulate_(torch.ones(2, 2), b, dual)


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
