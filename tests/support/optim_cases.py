"""Inputs for the tests of the optimizers' ops, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import reference
from cases import assert_all_same, copies
from executors import Executor

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Values = dict[str, Any]

ADAM: Values = {
    **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    **{"weight_decay": 0.1, "decoupled": True},
}
SGD: Values = {
    **{"lr": 0.1, "momentum": 0.9, "dampening": 0.0},
    **{"nesterov": False, "weight_decay": 0.1},
}
OPTIONS = {"adam_": ADAM, "sgd_": SGD}
OPS = tuple(OPTIONS)


def tensors(values: Values) -> list[Tensor]:
    """Return all tensors among the arguments."""
    listed = [x if isinstance(x, list) else [x] for x in values.values()]
    return [x for each in listed for x in each if isinstance(x, Tensor)]


def copied(values: Values) -> Values:
    """Return the arguments with copies of the tensors, and of the memory around them."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return copies(value)
        return copies([value])[0] if isinstance(value, Tensor) else value

    return {name: copy(value) for name, value in values.items()}


def surroundings(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())


def check(executor: Executor, op: str, values: Values) -> None:
    """Compare with the oracle all tensors after a call, and the memory around them."""
    expected = copied(values)
    getattr(reference, op)(**expected)
    getattr(executor.ops, op)(**values)
    assert_all_same(map(surroundings, tensors(values)), map(surroundings, tensors(expected)))


def placed(values: Tensor, offset: int) -> Tensor:
    """Return a copy that begins `offset` elements into its storage."""
    whole = torch.full((values.numel() + offset + 3,), 42.0, dtype=values.dtype)
    view = whole[offset : offset + values.numel()].as_strided(values.shape, values.stride(), offset)
    return view.copy_(values).to(values.device)


def state_of(
    op: str,
    params: Sequence[Tensor],
    *,
    dtypes: Sequence[torch.dtype] = (FP32, FP32),
    amsgrad: bool = False,
    momentum: bool = True,
) -> Values:
    """Return random state of parameters after some updates."""

    def moments(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty_like(p, dtype=dtype).copy_(torch.randn_like(p)) for p in params]

    device = params[0].device
    steps = [torch.tensor(float(3 * i), device=device) for i in range(len(params))]
    if op == "sgd_":
        return {"momentum_buffers": moments(dtypes[0]) if momentum else None, "steps": steps}
    state: Values = {"exp_avgs": moments(dtypes[0]), "steps": steps}
    state["exp_avg_sqs"] = [x.square_() for x in moments(dtypes[1])]
    if amsgrad:
        state["max_exp_avg_sqs"] = [x.square_() for x in moments(dtypes[1])]
    return state


def call(
    executor: Executor,
    op: str,
    shapes: Sequence[tuple[int, ...]] = ((19,), (40, 3), ()),
    dtype: torch.dtype = FP32,
    grad_dtype: torch.dtype = FP32,
    state: Values | None = None,
    **options: Any,
) -> Values:
    """Return the arguments of a call on random parameters and gradients."""
    params = [torch.randn(shape).to(executor.device, dtype) for shape in shapes]
    grads = [torch.randn(shape).to(executor.device, grad_dtype) for shape in shapes]
    values = {"params": params, "grads": grads, **state_of(op, params, **(state or {}))}
    return {**values, **OPTIONS[op], **options}
