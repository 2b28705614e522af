"""Test bad arguments specific to adam_ and sgd_; test_ops_errors.py has the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import tensors, unwritten
from optim_cases import OPS, Values
from reference import arguments


def second(spoil: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Spoil the second tensor of a list; its parameter has shape [3, 2]."""
    return lambda values: [values[0], spoil(values[1]), *values[2:]]


def holes(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


BOTH: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
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
ADAM = [
    ("exp_avg_sqs", second(transposed), RuntimeError, "exp_avg_sqs[1] must have the strides of"),
    ("exp_avg_sqs", lambda _: [], RuntimeError, "exp_avg_sqs must have as many tensors as params"),
    ("max_exp_avg_sqs", second(Tensor.half), RuntimeError, "have the dtype of exp_avg_sqs[1], got"),
    ("steps", lambda _: [], RuntimeError, "steps must have as many tensors as params, 3, got 0"),
    ("beta1", lambda _: 1.0, ValueError, "beta1 must be at least 0 and below 1, got 1"),
    ("beta2", lambda _: torch.nan, ValueError, "beta2 must be at least 0 and below 1, got nan"),
]
SGD = [
    ("momentum_buffers", second(holes), RuntimeError, "momentum_buffers[1] has holes"),
    ("momentum_buffers", lambda _: [], ValueError, "got 0 of them with momentum = 0.9"),
    ("momentum", lambda _: 0.0, ValueError, "got 3 of them with momentum = 0"),
    ("steps", lambda _: None, ValueError, "dampening and stochastic_rounding need steps"),
    ("nesterov", lambda _: True, ValueError, "momentum and no dampening, got momentum = 0.9, damp"),
]
FAULTS = [(op, *fault) for op in OPS for fault in BOTH]
FAULTS += [("adam_", *fault) for fault in ADAM] + [("sgd_", *fault) for fault in SGD]


@pytest.mark.parametrize(
    ("op", "argument", "spoil", "error", "text"),
    [pytest.param(*f, id=f"{f[0]}-{f[1]}-{f[4][-12:]}") for f in FAULTS],
)
def test_bad_argument(
    op: str,
    argument: str,
    spoil: Callable[[Any], Any],
    error: type[Exception],
    text: str,
) -> None:
    values: Values = arguments(op)
    values[argument] = spoil(values[argument])
    versions = [tensor._version for tensor in tensors(values)]
    with unwritten(tensors(values)), pytest.raises(error, match=re.escape(text)) as raised:
        getattr(ops, op)(**values)
    assert f"amp_ext::{op}: " in str(raised.value) or "unsupported operation" in str(raised.value)
    assert [tensor._version for tensor in tensors(values)] == versions


@pytest.mark.parametrize("op", OPS)
def test_shapes_of_meta_tensors(op: str) -> None:
    """A wrong shape under torch.compile is an error while tracing."""
    values = arguments(op, "meta")
    values["grads"][1] = values["grads"][1].t()
    with pytest.raises(RuntimeError, match=rf"{op}: grads\[1\] must have the shape of params\[1\]"):
        getattr(ops, op)(**values)
    values = arguments(op, "meta")
    del values["steps"][0]
    with pytest.raises(RuntimeError, match=rf"{op}: steps must have as many tensors as params, 3"):
        getattr(ops, op)(**values)
