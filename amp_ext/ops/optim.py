"""Define the updates of parameters by optimizers, one launch each.

Each function's body is the op's reference, and every backend agrees with it bit by bit. Each
operation on elements is in float32, rounded, in the order of the text. Numbers that a tensor's
elements share are computed in float64 and rounded once.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext.ops._numbers import (
    BF16,
    CHUNK,
    DTYPES,
    FP16,
    FP32,
    INF,
    NAN,
    full,
    integers,
    placed,
    tensor,
)
from amp_ext.ops._op import Case, cases, op
from amp_ext.ops.lists import clip_coefficient

__all__ = ["adam_", "sgd_"]


@op("params", "exp_avgs", "exp_avg_sqs", "steps", "max_exp_avg_sqs", "copies", "found_inf")
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    copies: Sequence[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Update every parameter once by Adam, AdamW or AMSGrad, as in ``torch.optim``.

    The update reads ``g = grad * inv_scale``, clipped to ``max_norm`` as :func:`unscale_` clips and
    not rounded to the gradient's dtype. The op does not write the gradients. The formulas are as in
    ``torch/optim/adam.py``, in float32 without fused multiply-adds, with bias corrections in
    float64. With t the number of the update::

        g := g + weight_decay * param                            unless decoupled
        exp_avg := beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq := beta2 * exp_avg_sq + (1 - beta2) * g * g
        max_exp_avg_sq := max(max_exp_avg_sq, exp_avg_sq)        takes exp_avg_sq's place below
        denominator := sqrt(exp_avg_sq) * (1 / sqrt(1 - beta2**t)) + eps
        param := param * (1 - lr * weight_decay) - lr / (1 - beta1**t) * (exp_avg / denominator)

    The factor of param is 1 unless decoupled.

    Args:
        params: float32, float16 or bfloat16, dense in memory, in any order of dimensions.
        grads: as many, of the same shapes; float32, float16 or bfloat16. If a gradient's elements
            lie in another order than its parameter's, the gradient is copied first.
        exp_avgs: the first moments, with the shapes and strides of params; float32, bfloat16 or
            float16.
        exp_avg_sqs: the second moments, likewise, of dtypes of their own.
        steps: float32 tensors of 1 element: the number of updates of the parameter so far. Advanced
            by 1.
        lr: the learning rate, rounded to float32 after division by the bias correction.
        beta1: decay rate of the first moments, at least 0 and below 1.
        beta2: decay rate of the second moments, likewise.
        eps: added to the denominator.
        weight_decay: a factor.
        decoupled: parameters are multiplied by ``1 - lr * weight_decay`` first, as by AdamW;
            otherwise ``weight_decay * param`` is added to the gradient.
        max_exp_avg_sqs: the largest second moments so far, of the dtypes of exp_avg_sqs: AMSGrad.
        copies: float16 or bfloat16 tensors with the shapes and strides of params: the parameters of
            the model, if params are their float32 masters. An element of params that does not round
            to its copy takes the copy's value first. Copies receive the updated params, rounded.
        maximize: ascend.
        stochastic_rounding: round bfloat16 parameters and moments up or down at random, with the
            probabilities that make the expected result exact. The step, the index of the tensor and
            the index of the element determine the random bits.
        tensor_lr: float32, 1 element: replaces ``lr``.
        found_inf: float32, 1 element. If it is not 0, nothing at all is written. Set to 1.0 if the
            norm is not finite.
        inv_scale: float32, 1 element; 1 when it is None.
        norm: float32, 1 element: the L2 norm of ``grads * inv_scale``. If it is not finite, nothing
            but ``found_inf`` is written.
        max_norm: the limit of the norm; None stands for no limit.

    Raises:
        ValueError: a beta is not in its range; ``max_norm`` is negative or NaN, or is given without
            a ``norm``.
        RuntimeError: lists of different length; shapes, strides or devices that differ; a written
            tensor that has holes, is a negated view or overlaps anything else in memory.
    """
    factors = _factors(lr, maximize, tensor_lr, found_inf, inv_scale, norm, max_norm)
    if factors is None:
        return
    l2 = 0.0 if decoupled else weight_decay
    keep = _fp32(1 - factors.lr * weight_decay if decoupled else 1.0, params)
    for i, step in enumerate(steps):
        param, exp_avg, exp_avg_sq = _flat(params[i]), _flat(exp_avgs[i]), _flat(exp_avg_sqs[i])
        copy = _flat(copies[i]) if copies else None
        _replace_stale(param, copy)
        update = _update_number(step)
        noise = _Noise(stochastic_rounding, update, i, param)
        g = _gradient(params[i], grads[i], factors, l2)
        first = exp_avg.float() * beta1 + g * (1 - beta1)
        second = exp_avg_sq.float() * beta2 + g * (1 - beta2) * g
        exp_avg.copy_(noise.rounded(first, exp_avg.dtype, 0, 16))
        exp_avg_sq.copy_(noise.rounded(second, exp_avg_sq.dtype, 1, 0))
        if max_exp_avg_sqs:
            largest = _flat(max_exp_avg_sqs[i])
            second = torch.maximum(largest.float(), second)
            largest.copy_(noise.rounded(second, largest.dtype, 1, 16))
        inv_root = _fp32(1 / math.sqrt(1 - _power(beta2, update)), params)
        step_size = _fp32(factors.lr / (1 - _power(beta1, update)), params)
        root = second.double().sqrt().float()  # torch's root in float32 may be off by one unit
        new = param.float() * keep - step_size * (first / (root * inv_root + eps))
        _store(param, new, noise, copy)
        step += 1


@op("params", "momentum_buffers", "steps", "copies", "found_inf")
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    steps: Sequence[Tensor] | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    copies: Sequence[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Update every parameter once by gradient descent, as in ``torch.optim.SGD``.

    Gradients are read as in :func:`adam_`. The formulas are as in ``torch/optim/sgd.py``::

        g := g + weight_decay * param
        buffer := momentum * buffer + (1 - dampening) * g        g where it is the first update
        param := param - lr * (g + momentum * buffer if nesterov else buffer)

    Without momentum, g takes the place of the buffer.

    Args:
        params: float32, float16 or bfloat16.
        grads: as many.
        momentum_buffers: with a momentum, and only then; the shapes and strides of params; float32,
            bfloat16 or float16.
        steps: float32 tensors of 1 element: the number of updates of the parameter so far, advanced
            by 1. If it is 0, the buffer is set to the gradient, whatever the dampening. Without
            steps, buffers of zeros give the same if ``dampening`` is 0. Needed with ``dampening``
            and with ``stochastic_rounding``.
        lr: the learning rate.
        momentum: decay rate of the buffers.
        dampening: the gradient enters the buffer with a factor of ``1 - dampening``.
        nesterov: Nesterov's momentum; needs a momentum and a ``dampening`` of 0.
        weight_decay: ``weight_decay * param`` is added to the gradient.
        copies: as in :func:`adam_`, and so are all that follow.

    Raises:
        ValueError: options that exclude each other, or that lack another argument.
        RuntimeError: as in :func:`adam_`.
    """
    factors = _factors(lr, maximize, tensor_lr, found_inf, inv_scale, norm, max_norm)
    if factors is None:
        return
    rate = _fp32(factors.lr, params)
    for i, whole in enumerate(params):
        param, copy = _flat(whole), _flat(copies[i]) if copies else None
        _replace_stale(param, copy)
        update = _update_number(steps[i]) if steps else 0
        noise = _Noise(stochastic_rounding, update, i, param)
        g = _gradient(whole, grads[i], factors, weight_decay)
        if momentum_buffers:
            buffer = _flat(momentum_buffers[i])
            new = g if update == 1 else buffer.float() * momentum + g * (1 - dampening)
            buffer.copy_(noise.rounded(new, buffer.dtype, 0, 16))
            g = g + new * momentum if nesterov else new
        _store(param, param.float() - rate * g, noise, copy)
        if steps:
            steps[i].add_(1)


# ---- arithmetic ----------------------------------------------------------------------------------


class _Factors(NamedTuple):
    lr: float
    inv_scale: float
    coefficient: float
    """The coefficient of clipping; negative to maximize."""


def _factors(
    lr: float,
    maximize: bool,
    tensor_lr: Tensor | None,
    found_inf: Tensor | None,
    inv_scale: Tensor | None,
    norm: Tensor | None,
    max_norm: float | None,
) -> _Factors | None:
    """Return the factors of all parameters; None if there is no update."""
    coefficient = 1.0
    if norm is not None:
        if not torch.isfinite(norm):
            if found_inf is not None:
                found_inf.fill_(1.0)
            return None
        coefficient = clip_coefficient(norm, max_norm).item()
    if found_inf is not None and found_inf.item() != 0:
        return None
    return _Factors(
        lr if tensor_lr is None else tensor_lr.item(),
        1.0 if inv_scale is None else inv_scale.item(),
        -coefficient if maximize else coefficient,
    )


def _update_number(step: Tensor) -> int:
    """Return the number of the update that follows `step` of them."""
    done = min(step.item(), 2.0**30)
    return int(done) + 1 if done > 0 else 1


def _power(base: float, exponent: int) -> float:
    """Return base**exponent by repeated squaring, as the kernels compute it."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


def _fp32(value: float, like: Sequence[Tensor]) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like[0].device if like else None)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _gradient(param: Tensor, grad: Tensor, factors: _Factors, l2: float) -> Tensor:
    in_order = torch.empty_strided(
        param.shape, param.stride(), dtype=torch.float32, device=param.device
    )
    g = _flat(in_order.copy_(grad)) * factors.inv_scale * factors.coefficient
    decay = torch.tensor(l2, dtype=torch.float32, device="cpu")
    return g + _flat(param).float() * l2 if decay != 0 else g


class _Noise:
    """Generate the random bits of elements from their places and the update."""

    def __init__(self, on: bool, update: int, tensor: int, elements: Tensor) -> None:
        self.key: Tensor | None = None
        if on:
            self.index = torch.arange(elements.numel(), device=elements.device)
            seed = _mixed(_mixed(torch.tensor(update, device="cpu")) + tensor).to(elements.device)
            self.key = _mixed(seed + self.index // CHUNK)

    def rounded(self, value: Tensor, dtype: torch.dtype, pair: int, shift: int) -> Tensor:
        """Round; to bfloat16 stochastically, up with the probability of the lost part."""
        if self.key is None or dtype != torch.bfloat16:
            return value.to(dtype)
        place = (2 * (self.index % CHUNK) + pair) * 0x9E3779B9
        noise = (_mixed(self.key + place) >> shift) & 0xFFFF
        bits = ((value.view(torch.int32).long() & 0xFFFFFFFF) + noise) >> 16
        signed = torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16)
        return torch.where(value.isfinite(), signed.view(torch.bfloat16), value.bfloat16())


def _replace_stale(param: Tensor, copy: Tensor | None) -> None:
    if copy is not None:
        is_stale = copy.view(torch.int16) != param.to(copy.dtype).view(torch.int16)
        param.copy_(torch.where(is_stale, copy.float(), param))


def _store(param: Tensor, new: Tensor, noise: _Noise, copy: Tensor | None) -> None:
    param.copy_(noise.rounded(new, param.dtype, 0, 0))
    if copy is not None:
        copy.copy_(new)


def _mixed(x: Tensor) -> Tensor:
    """Return the last step of MurmurHash3, of 32-bit numbers."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


# ---- verification ------------------------------------------------------------------------------


def _example() -> dict[str, Any]:
    return {
        "params": [full(4.0, 19), full(3.0, 3, 2), full(-2.0, 2, 4).t()],
        "grads": [full(4.0, 19), full(12.0, 3, 2).bfloat16(), full(2.0, 4, 2).half()],
        "steps": [full(0.0), full(1.0), full(7.0)],
        "copies": [full(4.0, 19).half(), full(1.0, 3, 2).bfloat16(), full(-2.0, 2, 4).half().t()],
        **{"lr": 0.1, "weight_decay": 0.01, "maximize": True, "stochastic_rounding": True},
        **{"tensor_lr": full(0.25), "found_inf": full(0.0), "inv_scale": full(0.5)},
        **{"norm": full(3.0), "max_norm": 2.0},
    }


def _moments(value: float) -> list[Tensor]:
    return [full(value, 19), full(value, 3, 2).bfloat16(), full(value, 2, 4).t()]


@cases(adam_)
def _adam_cases() -> Iterator[Case]:
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    moments = {"exp_avgs": _moments(0.5), "exp_avg_sqs": _moments(0.25)}
    largest = {"max_exp_avg_sqs": _moments(0.3)}
    yield Case("the example", {**_example(), **betas, "decoupled": True, **moments, **largest})
    yield from _update_cases({**betas, "decoupled": False}, has_squares=True)


@cases(sgd_)
def _sgd_cases() -> Iterator[Case]:
    options = {"momentum": 0.9, "dampening": 0.25, "nesterov": False}
    arguments = {**_example(), **options, "dampening": 0.1, "momentum_buffers": _moments(0.5)}
    yield Case("the example", arguments)
    yield from _update_cases(options, has_squares=False)
    plain = _update({**options, "momentum": 0.0, "dampening": 0.0}, False)
    yield Case("without momentum", {**plain, "momentum_buffers": None, "steps": None})
    yield Case("Nesterov's", _update({**options, "nesterov": True, "dampening": 0.0}, False))


def _update(
    options: dict[str, Any],
    has_squares: bool,
    dtypes: Sequence[torch.dtype] = (FP32,) * 4,
    shift: int = 0,
    sizes: Sequence[int] = (CHUNK + 3, 37, 0, 4),
) -> dict[str, Any]:
    """Return arguments with dtypes of parameters, gradients, first and second moments."""

    def listed(dtype: torch.dtype, seed: int, shift: int = 0) -> list[Tensor]:
        values = (integers(size + seed)[seed:] / 2048 for size in sizes)
        return placed([value.to(dtype) for value in values], shift)

    param, grad, first, second = dtypes
    lists = {"params": listed(param, 1, shift), "grads": listed(grad, 2, 2 * shift)}
    if has_squares:
        squares = [x.square_() for x in listed(second, 4, shift)]
        lists |= {"exp_avgs": listed(first, 3), "exp_avg_sqs": squares}
    else:
        lists |= {"momentum_buffers": listed(first, 3)}
    if param == FP32:
        copies = [value.to((FP16, BF16)[shift]) for value in lists["params"]]
        for copy in copies:
            copy[::3] += 1.0  # by other code
        lists |= {"copies": placed(copies)}
    steps = [tensor(float(i % 7)) for i in range(len(sizes))]
    return {**lists, "steps": steps, "lr": 0.125, "weight_decay": 0.01, **options}


def _update_cases(options: dict[str, Any], has_squares: bool) -> Iterator[Case]:
    plain = _update(options, has_squares)
    yield Case("float32", plain)
    for i, (dtype, grad) in enumerate(itertools.product((FP32, FP16, BF16), repeat=2)):
        moments = (DTYPES[i % 3], DTYPES[(i + 1) % 3])
        mixed = _update(options, has_squares, (dtype, grad, *moments), i % 2)
        more = {"stochastic_rounding": i % 2 == 0, "inv_scale": tensor(0.5)}
        yield Case(f"{dtype} by {grad}, {moments[0]} and {moments[1]}", {**mixed, **more})
    long = _update(options, has_squares, sizes=[i % 5 for i in range(450)])
    yield Case("a long list", long)
    for value in (1.0, NAN):
        skipped = {"found_inf": tensor(value), "norm": tensor(2.0), "max_norm": 1.0}
        yield Case(f"an overflow, {value}", {**plain, **skipped})
    bad = {"found_inf": tensor(0.0), "norm": tensor(INF)}
    yield Case("a norm that is not finite", {**plain, **bad})
