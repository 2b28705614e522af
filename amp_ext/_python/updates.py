"""adam_ and sgd_: their checks; the bodies are the oracle's, where Triton does not serve."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_ext._python import triton
from amp_ext._python.checks import (
    HALVES,
    Arguments,
    Span,
    check_device,
    check_max_norm,
    check_no_history,
    check_no_internal_overlap,
    check_not_negated,
    checked_dtype,
    checked_span,
    is_dense,
    overlaps,
    same_order,
    type_name,
)
from amp_ext._python.lists import mark_written
from amp_ext.reference import optim as reference

ADAM, SGD = "amp_ext::adam_", "amp_ext::sgd_"
Lists = dict[str, Sequence[Tensor] | None]
"""By argument; ``params`` first."""


class Scalars(NamedTuple):
    tensor_lr: Tensor | None = None
    found_inf: Tensor | None = None
    inv_scale: Tensor | None = None
    norm: Tensor | None = None
    max_norm: float | None = None


def adam_(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    steps,
    *,
    max_exp_avg_sqs=None,
    copies=None,
    maximize=False,
    stochastic_rounding=False,
    tensor_lr=None,
    found_inf=None,
    inv_scale=None,
    norm=None,
    max_norm=None,
    **numbers,
) -> None:
    lists = _adam_lists(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, copies)
    scalars = Scalars(tensor_lr, found_inf, inv_scale, norm, max_norm)
    _check_adam(lists, numbers)
    _check(ADAM, lists, scalars)
    by_chance = stochastic_rounding
    if params and triton.serves("adam", params[0].device):
        order = "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled"
        options = (*(numbers[name] for name in order), maximize, by_chance)
        columns = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, steps
        triton.update("adam_", _columns(columns), options, scalars)
    elif params or norm is not None:
        more = {"maximize": maximize, "stochastic_rounding": by_chance}
        reference.adam_(**lists, **numbers, **more, **scalars._asdict())
    _mark(lists, found_inf)


def sgd_(
    params,
    grads,
    momentum_buffers=None,
    steps=None,
    *,
    copies=None,
    maximize=False,
    stochastic_rounding=False,
    tensor_lr=None,
    found_inf=None,
    inv_scale=None,
    norm=None,
    max_norm=None,
    **numbers,
) -> None:
    lists = _sgd_lists(params, grads, momentum_buffers, steps, copies)
    scalars = Scalars(tensor_lr, found_inf, inv_scale, norm, max_norm)
    by_chance = stochastic_rounding
    _check_sgd(lists, numbers, by_chance)
    _check(SGD, lists, scalars)
    if params and triton.serves("sgd", params[0].device):
        order = "lr", "momentum", "dampening", "weight_decay", "nesterov"
        options = (*(numbers[name] for name in order), maximize, by_chance)
        columns = params, grads, momentum_buffers, None, None, copies, steps
        triton.update("sgd_", _columns(columns), options, scalars)
    elif params or norm is not None:
        more = {"maximize": maximize, "stochastic_rounding": by_chance}
        reference.sgd_(**lists, **numbers, **more, **scalars._asdict())
    _mark(lists, found_inf)


def adam_fake(params, grads, exp_avgs, exp_avg_sqs, steps, **options) -> None:
    more = options.get("max_exp_avg_sqs"), options.get("copies")
    lists = _adam_lists(params, grads, exp_avgs, exp_avg_sqs, steps, *more)
    _check_adam(lists, options)
    _check_fake(ADAM, lists, options)


def sgd_fake(params, grads, momentum_buffers=None, steps=None, **options) -> None:
    lists = _sgd_lists(params, grads, momentum_buffers, steps, options.get("copies"))
    _check_sgd(lists, options, options.get("stochastic_rounding", False))
    _check_fake(SGD, lists, options)


def _adam_lists(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, copies) -> Lists:
    return {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "copies": copies,
        "steps": steps,
    }


def _sgd_lists(params, grads, momentum_buffers, steps, copies) -> Lists:
    buffers = {"momentum_buffers": momentum_buffers}
    return {"params": params, "grads": grads, **buffers, "copies": copies, "steps": steps}


def _columns(lists: Sequence[Sequence[Tensor] | None]) -> list[Sequence[Tensor | None]]:
    count = len(lists[0])
    return [column or [None] * count for column in lists]


def _mark(lists: Lists, found_inf: Tensor | None) -> None:
    written = [t for name, tensors in lists.items() if name != "grads" for t in tensors or ()]
    mark_written(*written, found_inf)


# ---- checks ------------------------------------------------------------------------------------


def _check_lengths(op: str, lists: Lists, optional: Sequence[str]) -> None:
    count = len(lists["params"])
    for name, tensors in lists.items():
        size = len(tensors or ())
        if size != count and not (size == 0 and name in optional):
            raise RuntimeError(
                f"{op}: {name} must have as many tensors as params, {count}, got {size}"
            )


def _check_adam(lists: Lists, numbers: dict[str, float]) -> None:
    _check_lengths(ADAM, lists, ("max_exp_avg_sqs", "copies"))
    for name in ("beta1", "beta2"):
        if not 0 <= numbers[name] < 1:
            raise ValueError(
                f"{ADAM}: {name} must be at least 0 and below 1, got {numbers[name]:g}"
            )


def _check_sgd(lists: Lists, numbers: dict[str, float], by_chance: bool) -> None:
    _check_lengths(SGD, lists, ("momentum_buffers", "copies", "steps"))
    momentum, dampening = numbers["momentum"], numbers["dampening"]
    buffers = len(lists["momentum_buffers"] or ())
    if lists["params"] and (buffers == 0) != (momentum == 0):
        raise ValueError(
            f"{SGD}: momentum_buffers are for a momentum other than 0, got {buffers} of them with "
            f"momentum = {momentum:g}"
        )
    if lists["params"] and (by_chance or (momentum and dampening)) and not lists["steps"]:
        raise ValueError(f"{SGD}: dampening and stochastic_rounding need steps, got none")
    if numbers["nesterov"] and not (momentum and dampening == 0):
        raise ValueError(
            f"{SGD}: nesterov needs a momentum and no dampening, got momentum = {momentum:g}, "
            f"dampening = {dampening:g}"
        )


def _device(lists: Lists, scalars: Scalars) -> torch.device | None:
    tensors = [*lists["params"], *(t for t in scalars[:4] if t is not None)]
    return tensors[0].device if tensors else None


def _check_fake(op: str, lists: Lists, options: dict) -> None:
    scalars = Scalars(**{name: options.get(name) for name in Scalars._fields})
    check_max_norm(op, scalars.max_norm, scalars.norm)
    device = _device(lists, scalars)
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors or ()):
            check_device(op, f"{name}[{index}]", tensor, device)
            if name != "steps":
                _check_shape(op, name, index, tensor, lists["params"][index])
    for name, tensor in scalars._asdict().items():
        if isinstance(tensor, Tensor):
            check_device(op, name, tensor, device)


def _check_shape(op: str, name: str, index: int, tensor: Tensor, param: Tensor) -> None:
    if tensor.shape != param.shape:
        raise RuntimeError(
            f"{op}: {name}[{index}] must have the shape of params[{index}], {list(param.shape)}, "
            f"got {list(tensor.shape)}"
        )


def _check(op: str, lists: Lists, scalars: Scalars) -> None:
    device = _device(lists, scalars)
    if device is None:
        check_max_norm(op, scalars.max_norm, scalars.norm)
        return
    written, read = [], []
    for index in range(len(lists["params"])):
        for name, tensors in lists.items():
            if not tensors:
                continue
            if tensors[index] is None:  # a copy
                continue
            span = _check_tensor(op, lists, name, index, device)
            (read if name == "grads" else written).append((span, f"{name}[{index}]"))
    check_max_norm(op, scalars.max_norm, scalars.norm)
    one = Arguments(op, device)
    for name, tensor in scalars._asdict().items():
        if isinstance(tensor, Tensor):
            places = written if name == "found_inf" else read
            places.append((one.checked_one(name, tensor), name))
    _check_apart(op, written, read)


def _check_tensor(op: str, lists: Lists, role: str, index: int, device: torch.device) -> Span:
    tensor, param, name = lists[role][index], lists["params"][index], f"{role}[{index}]"
    dtype = checked_dtype(op, name, tensor, device)
    if dtype == torch.float64:
        raise NotImplementedError(
            f"{op}: {name} is Double, expected float32, float16 or bfloat16: updates are computed "
            "in float32, torch's own optimizers do them in float64"
        )
    if role == "steps":
        if dtype != torch.float32 or tensor.numel() != 1:
            raise RuntimeError(
                f"{op}: {name} must be a float tensor of 1 element, got {type_name(dtype)} of "
                f"shape {list(tensor.shape)}"
            )
    else:
        _check_shape(op, role, index, tensor, param)
    if role == "copies" and not (dtype in HALVES and param.dtype == torch.float32):
        raise RuntimeError(
            f"{op}: {name} must be float16 or bfloat16, of a float32 parameter, got "
            f"{type_name(dtype)} of {type_name(param.dtype)}"
        )
    if role == "max_exp_avg_sqs" and dtype != lists["exp_avg_sqs"][index].dtype:
        raise RuntimeError(
            f"{op}: {name} must have the dtype of exp_avg_sqs[{index}], got {type_name(dtype)}"
        )
    if role == "grads":
        return (0, 0) if tensor._is_zerotensor() else checked_span(op, name, tensor)
    check_not_negated(op, name, tensor)
    if tensor._is_zerotensor():
        raise RuntimeError(
            f"{op}: ZeroTensors are immutable, expected {name} to have memory: clone() it"
        )
    if not is_dense(tensor):
        check_no_internal_overlap(op, name, tensor)
        raise RuntimeError(
            f"{op}: {name} has holes (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}), expected dense memory: clone() it"
        )
    if role != "steps" and not same_order(tensor, param):
        raise RuntimeError(
            f"{op}: {name} must have the strides of params[{index}], {list(param.stride())}, got "
            f"{list(tensor.stride())}: torch.empty_like(param) has them"
        )
    check_no_history(op, name, tensor)
    return checked_span(op, name, tensor)


def _check_apart(op: str, written: list[tuple[Span, str]], read: list[tuple[Span, str]]) -> None:
    def refuse(one: str, other: str) -> None:
        raise RuntimeError(
            f"{op}: {one} and {other} overlap in memory, expected what is written apart from all "
            "else: clone() one"
        )

    places = sorted(place for place in written if place[0][1])
    for (span, name), (next_span, next_name) in zip(places, places[1:]):  # noqa: B905, RUF007
        if overlaps(span, next_span):
            refuse(name, next_name)
    begins = [span[0] for span, _ in places]
    for span, name in read:
        behind = bisect_left(begins, span[1])
        if behind and overlaps(places[behind - 1][0], span):
            refuse(places[behind - 1][1], name)
