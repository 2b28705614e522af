"""Test that bad arguments raise an error with op and argument, and write nothing."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from amp_ext import ops
from amp_ext.ops import GEMM_OPS, LIST_OPS
from places import Place, assert_refused, of_ops
from reference import arguments

ELSEWHERE = "Expected all tensors to be on the same device"
OVERLAPS = "more than one element of the written-to tensor refers to a single memory location"


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


# ---- any tensor --------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "device": (meta, rf": {ELSEWHERE}"),
    "layout": (Tensor.to_sparse, r": {said} must be a strided tensor, got layout Sparse"),
    "dtype": (Tensor.cfloat, r"\b{said}.*ComplexFloat|ComplexFloat.*{said} must be float16"),
}


@pytest.mark.parametrize("kind", KINDS)
@of_ops(LIST_OPS + GEMM_OPS)
def test_kinds_of_tensors(place: Place, kind: str) -> None:
    """A tensor of another device, layout or dtype is refused anywhere."""
    spoil, text = KINDS[kind]
    values = arguments(place.op)
    place.put(values, spoil(place.of(values)))
    is_scalar = place.op in LIST_OPS and (place.index is None or place.argument == "found_infs")
    error = RuntimeError if is_scalar or kind == "device" else NotImplementedError
    assert_refused(
        place.op, values, f"amp_ext::{place.op}.*(?:{text.format(said=place.said)})", error
    )


@pytest.mark.parametrize("size", [0, 2])
@of_ops(LIST_OPS, lambda p: p.argument != "steps" and p.of(arguments(p.op)).dim() == 0)
def test_no_or_two_elements_for_one(place: Place, size: int) -> None:
    """An argument of one element refuses none and two."""
    values = arguments(place.op)
    place.put(values, place.of(values).new_zeros(size))
    text = rf"{place.said} must be contiguous, of size 1, got shape \[{size}\]"
    assert_refused(place.op, values, text)


@of_ops(LIST_OPS, lambda place: place.index is not None and place.is_written)
def test_written_tensors_that_require_grad(place: Place) -> None:
    """Written tensors are refused where autograd would miss the write."""
    values = arguments(place.op)
    place.put(values, place.of(values).clone().requires_grad_())
    text = f"{place.said} requires grad.*expected torch.no_grad"
    assert_refused(place.op, values, text, modes=[torch.enable_grad])


# ---- each check --------------------------------------------------------------------------------


def second(spoil: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Spoil the second tensor of a list."""
    return lambda values: [values[0], spoil(values[1]), *values[2:]]


def window(t: Tensor) -> Tensor:
    return t.as_strided(t.shape, (1, 1))


def holes(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


# Op, argument, fault and text. a is [2, 3, 4], b is [5, 4], params[1] is [3, 2].
Fault = tuple[str, str, Callable[[Any], Any], str]
SHAPES: list[Fault] = [
    ("gemm", "a", lambda t: t[0, 0], "a must have at least 2 dimensions, got shape [4]"),
    ("gemm", "b", lambda t: t[0], "b must have at least 2 dimensions, got shape [4]"),
    ("gemm", "a", lambda t: t[..., :3], "a of shape [2, 3, 3] needs a b of 3 columns, got"),
    ("gemm", "b", lambda t: t.expand(1, 5, 4), "leading dimensions of a and b must be equal"),
    ("gemm", "sum_batch", lambda _: True, "sum_batch needs leading dimensions in a and b"),
    ("gemm", "bias", lambda t: t[:1], "bias must have shape [5], got shape [1]"),
    ("gemm", "c", lambda t: t.new_zeros(4, 1), "c must be expandable to the result's shape"),
    ("gemm", "c", lambda t: t.new_zeros(1, 2, 3, 5), "[2, 3, 5], got shape [1, 2, 3, 5]"),
    ("gemm", "bias", lambda t: t[None], "bias must have shape [5], got shape [1, 5]"),
]
FAULTS: list[Fault] = [
    *SHAPES,
    ("unscale_", "grads", second(lambda t: t[:1].expand(4, 2)), OVERLAPS),
    ("unscale_", "grads", second(window), f"grads[1] has strides [1, 1]: {OVERLAPS}"),
    ("update_scale_", "next_step", lambda t: t[:2], "next_step must be contiguous, of size 3"),
    ("update_scale_", "next_step", holes, "got shape [3] and strides [2]"),
    (
        "update_scale_",
        "found_infs",
        lambda _: [],
        "found_infs must hold from 1 to 448 tensors, got 0",
    ),
    ("update_scale_", "hysteresis", lambda _: 0, "hysteresis must be from 1 to 2147483647, got 0"),
    ("update_scale_", "hysteresis", lambda _: 2**31, "from 1 to 2147483647, got 2147483648"),
    ("update_scale_", "hysteresis_tracker", lambda _: None, "got None"),
    ("cast_", "inputs", lambda x: x[:2], "inputs must have as many tensors as outputs, 3, got 2"),
    ("cast_", "outputs", lambda _: [], "inputs must have as many tensors as outputs, 0, got 3"),
    ("cast_", "inputs", second(Tensor.t), "inputs[1] must have the shape of outputs[1], [4, 2]"),
    ("cast_", "outputs", second(window), f"outputs[1] has strides [1, 1]: {OVERLAPS}"),
    ("gemm", "out_dtype", lambda _: torch.int32, "out_dtype must be float16, bfloat16, float32 or"),
    ("gemm_accumulate_", "c", lambda t: t[:1], "c must have the shape of the result, [2"),
    ("adam_", "grads", lambda x: x[:2], "grads must have as many tensors as params, 3, got 2"),
    ("adam_", "grads", second(Tensor.t), "grads[1] must have the shape of params[1], [3, 2]"),
    ("adam_", "copies", lambda x: x[:2], "copies must have as many tensors as params, 3, got 2"),
    ("sgd_", "steps", lambda x: [*x, x[0]], "steps must have as many tensors as params, 3, got 4"),
    ("adam_", "params", second(holes), "has holes (shape [3, 2], strides [4, 2])"),
    ("adam_", "params", second(lambda t: t[:1].expand(3, 2)), OVERLAPS),
    ("adam_", "params", second(Tensor.half), "of a float32 parameter, got BFloat16 of Half"),
    ("adam_", "copies", second(Tensor.float), "copies[1] must be float16 or bfloat16"),
    ("adam_", "copies", second(transposed), "copies[1] must have the strides of params[1]"),
    ("adam_", "steps", second(Tensor.half), "steps[1] must be a float tensor of 1 element"),
    ("adam_", "steps", second(lambda t: t.expand(2)), "got Float of shape [2]"),
    ("adam_", "steps", lambda _: [], "steps must have as many tensors as params, 3, got 0"),
    ("adam_", "exp_avg_sqs", lambda _: [], "exp_avg_sqs must have as many tensors as params, 3"),
    ("adam_", "max_exp_avg_sqs", second(Tensor.half), "must have the dtype of exp_avg_sqs[1], got"),
]
VALUE_FAULTS: list[Fault] = [
    ("unscale_", "max_norm", lambda _: -1.0, "must be a number that is not negative, got -1"),
    ("unscale_", "norm", lambda _: None, "max_norm = 2 needs a norm, got None"),
    ("adam_", "max_norm", lambda _: -1.0, "must be a number that is not negative, got -1"),
    ("adam_", "beta1", lambda _: 1.0, "beta1 must be at least 0 and below 1, got 1"),
    ("adam_", "beta2", lambda _: torch.nan, "beta2 must be at least 0 and below 1, got nan"),
    ("sgd_", "momentum_buffers", lambda _: [], "got 0 of them with momentum = 0.9"),
    ("sgd_", "momentum", lambda _: 0.0, "got 3 of them with momentum = 0"),
    ("sgd_", "steps", lambda _: None, "dampening and stochastic_rounding need steps"),
    ("sgd_", "nesterov", lambda _: True, "nesterov needs a momentum and no dampening"),
]
DOUBLE: Fault = ("adam_", "params", second(Tensor.double), "params[1] is Double, expected float32")
ERRORS = {RuntimeError: FAULTS, ValueError: VALUE_FAULTS, NotImplementedError: [DOUBLE]}


def spoilt(fault: Fault) -> dict[str, Any]:
    op, argument, spoil, _ = fault
    good = arguments(op)
    return good | {argument: spoil(good.get(argument))}


@pytest.mark.parametrize(
    ("error", "fault"),
    [(error, fault) for error, faults in ERRORS.items() for fault in faults],
    ids=lambda value: value.__name__ if isinstance(value, type) else f"{value[0]}-{value[1]}",
)
def test_bad_argument(error: type[Exception], fault: Fault) -> None:
    """Each check of an op names the argument."""
    op, _, _, text = fault
    start = "unsupported operation: " if text == OVERLAPS else f"amp_ext::{op}: "
    assert_refused(op, spoilt(fault), f"^{start}.*{re.escape(text)}", error)


@pytest.mark.parametrize("fault", SHAPES, ids=lambda f: f"{f[0]}-{f[1]}")
def test_bad_shape_of_meta_tensors(fault: Fault) -> None:
    """Under torch.compile a wrong shape of a product is an error while tracing."""
    op, _, _, text = fault
    values = tree_map_only(Tensor, meta, spoilt(fault))
    with pytest.raises(RuntimeError, match=rf"amp_ext::{op}: .*{re.escape(text)}"):
        getattr(ops, op)(**values)
