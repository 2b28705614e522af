"""Test that bad arguments raise an error with op and argument, and write nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from amp_ext import ops
from amp_ext.ops import LIST_OPS
from cases import OVERLAPPING, tensors, unwritten, whole_and_view, written
from reference import arguments

CPU = torch.device("cpu")
ELSEWHERE = "Expected all tensors to be on the same device"
ONE_LOCATION = "more than one element of the written-to tensor refers to a single memory location"


class Fault(NamedTuple):
    """Describe one bad argument: its derivation from a good one, and its error."""

    op: str
    argument: str
    what: str
    spoil: Callable[[Any], Any]
    error: type[Exception]
    text: str

    def arguments(self) -> dict[str, Any]:
        good = arguments(self.op)
        return good | {self.argument: self.spoil(good.get(self.argument))}


def second(spoil: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Spoil the second tensor of a list."""
    return lambda values: [values[0], spoil(values[1]), *values[2:]]


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


KINDS = {torch.float32: "a float", torch.int32: "an int", torch.int64: "a long"}


def with_grad(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def scalar_faults(op: str, argument: str, kind: str) -> Iterator[Fault]:
    """Yield the faults of an argument that must be a tensor of one element.

    torch's two ops say the same.
    """
    said = {"scale": "current_scale", "found_infs": "found_inf"}.get(argument, argument)
    listed = second if argument == "found_infs" else (lambda spoil: spoil)
    shape, dtype = f"{said} must be a 1-element tensor, got shape ", f"{said} must be {kind} tensor"
    other_dtype = Tensor.double if kind == "a float" else Tensor.float
    for what, spoil, text in (
        ("two-elements", lambda t: t.new_zeros(2), shape + r"\[2\]"),
        ("empty", lambda t: t.new_zeros(0), shape + r"\[0\]"),
        ("dtype", other_dtype, f"{dtype}, got (Double|Float)"),
        ("device", meta, ELSEWHERE),
    ):
        yield Fault(op, argument, what, listed(spoil), RuntimeError, text)


def gradient_faults(op: str) -> Iterator[Fault]:
    """Yield the faults of one gradient in a list of good ones."""
    dtype = rf"\"amp_ext::{op}\" not implemented for '{{}}': grads\[1\] must be float16, bfloat16"
    layout = r"grads\[1\] must be (a )?strided"
    for what, spoil, error, text in (
        ("int", Tensor.int, NotImplementedError, dtype.format("Int")),
        ("complex", Tensor.cfloat, NotImplementedError, dtype.format("ComplexFloat")),
        ("sparse", Tensor.to_sparse, NotImplementedError, layout),
        ("device", meta, RuntimeError, ELSEWHERE),
    ):
        yield Fault(op, "grads", what, second(spoil), error, text)


def vector_faults(op: str, name: str) -> Iterator[Fault]:
    """Yield the faults of an argument that must be float32 of shape [3]."""
    good = torch.zeros(3)
    for what, bad, text in (
        ("length", torch.zeros(2), r"must have shape \[3\], got shape \[2\]"),
        ("strided", torch.zeros(6)[::2], r"must be contiguous, got strides \[2\]"),
        ("sparse", good.to_sparse(), "must be a strided tensor, got layout Sparse"),
        ("dtype", good.double(), "must be a float tensor, got Double"),
        ("device", meta(good), None),
    ):
        says = f"{name} {text}" if text else ELSEWHERE
        yield Fault(op, name, what, lambda _, bad=bad: bad, RuntimeError, says)


def cast_faults() -> Iterator[Fault]:
    """Yield bad lists of cast_: [3], [4, 2], [] of bfloat16 from as many inputs."""
    op, both = "cast_", ("outputs", "inputs")
    for argument in both:
        dtype = rf"\"amp_ext::cast_\" not implemented for '{{}}': {argument}\[1\] must be float16"
        layout = rf"{argument}\[1\] must be a strided"
        for what, spoil, error, text in (
            ("int", Tensor.int, NotImplementedError, dtype.format("Int")),
            ("sparse", Tensor.to_sparse, NotImplementedError, layout),
            ("device", meta, RuntimeError, ELSEWHERE),
        ):
            yield Fault(op, argument, what, second(spoil), error, text)
    lengths = r"inputs must have as many tensors as outputs, (3, got 2|2, got 3|0, got 3|3, got 0)"
    shapes = r"inputs\[1\] must have the shape of outputs\[1\], \[4, 2\], got \[{}\]"
    for what, argument, spoil, text in (
        ("shorter", "inputs", lambda tensors: tensors[:2], lengths),
        ("none", "outputs", lambda _: [], lengths),
        ("transposed", "inputs", second(Tensor.t), shapes.format("2, 4")),
        ("broadcast", "inputs", second(lambda t: t[:1]), shapes.format("1, 2")),
    ):
        yield Fault(op, argument, what, spoil, RuntimeError, text)
    for what, spoil, text in (
        ("expanded", second(lambda t: t[:1].expand(4, 2)), ONE_LOCATION),
        ("sliding-window", second(lambda t: t.as_strided((4, 2), (1, 1))), ONE_LOCATION),
    ):
        yield Fault(op, "outputs", what, spoil, RuntimeError, text)


def overlap_faults() -> Iterator[Fault]:
    """Yield the faults of memory that would be written more than once."""
    for layout in OVERLAPPING:
        view = whole_and_view(layout, torch.float32, CPU)[1]
        spoil = second(lambda _, view=view: view)
        yield Fault("unscale_", "grads", layout, spoil, RuntimeError, ONE_LOCATION)


def gemm_shape_faults() -> Iterator[Fault]:
    """Yield shapes that do not fit in gemm and linear: [2, 3, 4] @ [5, 4].T + bias of [5]."""
    for op, a, b in (("gemm", "a", "b"), ("linear", "x", "weight")):
        either = rf"\b({a}|{b})\b"
        for argument, what, spoil, text in (
            (a, "zero-dim", lambda t: t[0, 0, 0], rf"\b{a}\b.*\[\]"),
            (a, "inner", lambda t: t[..., :3], rf"{either}.*3\]"),
            (b, "inner", lambda t: t[:, :3], rf"{either}.*3\]"),
            (b, "one-dim", lambda t: t[0], rf"\b{b}\b.*\[4\]"),
            (b, "batch-of-one", lambda t: t.expand(1, 5, 4), rf"\b{b}\b.*\[1, 5, 4\]"),
            (b, "more-batches", lambda t: t.expand(2, 2, 5, 4), rf"\b{b}\b.*\[2, 2, 5, 4\]"),
            ("bias", "one", lambda t: t[:1], r"\bbias\b.*\[1\]"),
            ("bias", "zero-dim", lambda t: t[0], r"\bbias\b.*\[\]"),
            ("bias", "matrix", lambda t: t[None], r"\bbias\b.*\[1, 5\]"),
        ):
            yield Fault(op, argument, what, spoil, RuntimeError, text)
    for what, shape in (("rows", (4, 1)), ("columns", (3, 4)), ("more-dims", (1, 2, 3, 5))):
        text = rf"\bc\b.*{re.escape(str(list(shape)))}"
        spoil = lambda t, shape=shape: t.new_zeros(shape)  # noqa: E731
        yield Fault("gemm", "c", what, spoil, RuntimeError, text)
    text = r"sum_batch.*\[2, 3, 4\].*\[5, 4\]"
    yield Fault("gemm", "sum_batch", "shared-operand", lambda _: True, RuntimeError, text)
    yield Fault("gemm", "a", "one-dim", lambda t: t[0, 0], RuntimeError, r"\ba\b.*\[4\]")


def gemm_faults() -> Iterator[Fault]:
    """Yield bad dtypes, layouts, devices and options of gemm and linear."""
    for op, operands in (("gemm", ("a", "b", "c", "bias")), ("linear", ("x", "weight", "bias"))):
        for argument in operands:
            name = rf"\b{argument}\b"
            for what, spoil, error, text in (
                ("int", Tensor.int, NotImplementedError, rf"{name}.*\bInt\b"),
                ("sparse", Tensor.to_sparse, NotImplementedError, rf"{name}.*strided"),
                ("device", meta, RuntimeError, ELSEWHERE),
            ):
                yield Fault(op, argument, what, spoil, error, text)
        yield Fault(op, "activation", "swish", lambda _: "swish", ValueError, "activation.*swish")
    spoil = lambda _: torch.int32  # noqa: E731
    yield Fault("gemm", "out_dtype", "int", spoil, RuntimeError, r"out_dtype.*\bInt\b")


def aux_faults() -> Iterator[Fault]:
    """Yield bad tensors as gemm_times_derivative's aux, of shape [2, 3, 5]."""
    for what, spoil, error, text in (
        ("shape", lambda t: t[:1], RuntimeError, r"aux must have.*\[2, 3, 5\].*\[1, 3, 5\]"),
        ("device", meta, RuntimeError, ELSEWHERE),
        ("int", Tensor.int, NotImplementedError, r"\baux\b.*\bInt\b"),
    ):
        yield Fault("gemm_times_derivative", "aux", what, spoil, error, text)


# ---- updates -----------------------------------------------------------------------------------


def holes(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


# Argument, fault, error and text. The second tensor of a list has the shape [3, 2].
BOTH_UPDATES: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("params", second(Tensor.double), NotImplementedError, "params[1] is Double, expected float32"),
    ("grads", second(Tensor.double), NotImplementedError, "grads[1] is Double, expected float32"),
    ("grads", lambda x: x[:2], RuntimeError, "grads must have as many tensors as params, 3, got 2"),
    ("copies", lambda x: x[:2], RuntimeError, "copies must have as many tensors as params, 3"),
    ("steps", lambda x: [*x, x[0]], RuntimeError, "steps must have as many tensors as params, 3"),
    ("grads", second(Tensor.t), RuntimeError, "grads[1] must have the shape of params[1], [3, 2]"),
    ("copies", second(lambda t: t[:1]), RuntimeError, "the shape of params[1], [3, 2], got [1, 2]"),
    ("params", second(holes), RuntimeError, "params[1] has holes (shape [3, 2], strides [4, 2])"),
    ("copies", second(holes), RuntimeError, "copies[1] has holes"),
    ("copies", second(transposed), RuntimeError, "copies[1] must have the strides of params[1]"),
    (
        "copies",
        second(Tensor.float),
        RuntimeError,
        "must be float16 or bfloat16, of a float32 para",
    ),
    ("params", second(Tensor.half), RuntimeError, "of a float32 parameter, got BFloat16 of Half"),
    ("steps", second(Tensor.half), RuntimeError, "steps[1] must be a float tensor of 1 element"),
    ("steps", second(lambda t: t.expand(2)), RuntimeError, "got Float of shape [2]"),
    ("params", second(lambda t: t[:1].expand(3, 2)), RuntimeError, "more than one element"),
    ("norm", lambda _: None, ValueError, "max_norm = 2 needs a norm, got None"),
    ("max_norm", lambda _: -1.0, ValueError, "max_norm must be a number that is not negative"),
]
ADAM_ = [
    ("exp_avg_sqs", second(transposed), RuntimeError, "exp_avg_sqs[1] must have the strides of"),
    ("exp_avg_sqs", lambda _: [], RuntimeError, "exp_avg_sqs must have as many tensors as params"),
    ("max_exp_avg_sqs", second(Tensor.half), RuntimeError, "have the dtype of exp_avg_sqs[1], got"),
    ("steps", lambda _: [], RuntimeError, "steps must have as many tensors as params, 3, got 0"),
    ("beta1", lambda _: 1.0, ValueError, "beta1 must be at least 0 and below 1, got 1"),
    ("beta2", lambda _: torch.nan, ValueError, "beta2 must be at least 0 and below 1, got nan"),
]
SGD_ = [
    ("momentum_buffers", second(holes), RuntimeError, "momentum_buffers[1] has holes"),
    ("momentum_buffers", lambda _: [], ValueError, "got 0 of them with momentum = 0.9"),
    ("momentum", lambda _: 0.0, ValueError, "got 3 of them with momentum = 0"),
    ("steps", lambda _: None, ValueError, "dampening and stochastic_rounding need steps"),
    ("nesterov", lambda _: True, ValueError, "momentum and no dampening, got momentum = 0.9, damp"),
]


def update_faults() -> Iterator[Fault]:
    """Yield the faults of adam_ and sgd_ alone."""
    for op, faults in (("adam_", BOTH_UPDATES + ADAM_), ("sgd_", BOTH_UPDATES + SGD_)):
        for argument, spoil, error, text in faults:
            yield Fault(op, argument, text[-12:], spoil, error, re.escape(text))


def all_faults() -> Iterator[Fault]:
    for op in LIST_OPS:
        for name, value in arguments(op).items():
            if name == "grads":
                yield from gradient_faults(op)
            one = value[0] if name == "found_infs" else value
            if isinstance(one, Tensor) and one.dim() == 0:
                yield from scalar_faults(op, name, KINDS[one.dtype])
            if isinstance(value, list) and name in written(op):
                text = rf"{name}\[1\] requires grad, and this op is not differentiable"
                yield Fault(op, name, "requires-grad", second(with_grad), RuntimeError, text)
    yield from vector_faults("grad_norm", "norms")
    yield from vector_faults("update_scale_", "next_step")
    for value in (-1.0, -math.inf, math.nan):
        text = f"max_norm must be a number that is not negative, got {value:g}"
        spoil = lambda _, value=value: value  # noqa: E731
        yield Fault("unscale_", "max_norm", f"{value}", spoil, ValueError, text)
    text = "max_norm = 2 needs a norm, got None"
    yield Fault("unscale_", "norm", "none", lambda _: None, ValueError, text)
    yield from overlap_faults()
    yield from cast_faults()

    op = "update_scale_"
    yield Fault(op, "found_infs", "none", lambda _: [], RuntimeError, "at least one")
    text = "from 1 to 2147483647, got 0"
    yield Fault(op, "hysteresis", "zero", lambda _: 0, RuntimeError, text)
    yield Fault(op, "hysteresis_tracker", "missing", lambda _: None, RuntimeError, "got None")

    yield from gemm_shape_faults()
    yield from gemm_faults()
    yield from aux_faults()
    yield from update_faults()


FAULTS = list(all_faults())


def parametrized(faults: Iterable[Fault]) -> pytest.MarkDecorator:
    named = [pytest.param(f, id=f"{f.op}-{f.argument}-{f.what}") for f in faults]
    return pytest.mark.parametrize("fault", named)


def raised(error: type[Exception], function: Callable[..., Any], **values: Any) -> Exception:
    with pytest.raises(error) as caught:
        function(**values)
    return caught.value


@parametrized(FAULTS)
def test_bad_argument(fault: Fault) -> None:
    values = fault.arguments()
    versions = [tensor._version for tensor in tensors(values)]
    with unwritten(tensors(values)):
        error = raised(fault.error, getattr(ops, fault.op), **values)
    assert [tensor._version for tensor in tensors(values)] == versions
    assert re.search(fault.text, str(error)), error
    if not str(error).startswith("unsupported operation"):
        assert f"amp_ext::{fault.op}" in str(error)


# Numbers and shapes of tensors in a list.
OF_LISTS = [f for f in update_faults() if f.argument in ("grads", "steps") and "params" in f.text]


@parametrized([*gemm_shape_faults(), *OF_LISTS])
def test_bad_shape_of_meta_tensors(fault: Fault) -> None:
    """Under torch.compile a wrong shape is an error while tracing."""
    values = tree_map_only(Tensor, meta, fault.arguments())
    error = raised(fault.error, getattr(ops, fault.op), **values)
    assert re.search(rf"amp_ext::{fault.op}\b.*{fault.text}", str(error)), error
