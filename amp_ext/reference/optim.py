"""The oracle of the optimizers' updates.

Each operation on elements is one in fp32, rounded, in the order in which it is written; what is the
same for all elements of a tensor is computed in fp64 and rounded once. An op agrees bit for bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from amp_ext.reference.lists import clip_coefficient

__all__ = ["adam_", "sgd_"]

CHUNK = 16384  # elements


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    max_exp_avg_sqs: list[Tensor] | None = None,
    copies: list[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Update parameters by Adam (Kingma and Ba, 2015), AdamW (`decoupled`) or AMSGrad.

    With g the gradient, unscaled, clipped and negated to maximize, and t the number of the update:

        g := g + weight_decay * param                            unless decoupled
        exp_avg := beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq := beta2 * exp_avg_sq + (1 - beta2) * g * g
        max_exp_avg_sq := max(max_exp_avg_sq, exp_avg_sq)        takes exp_avg_sq's place below
        denominator := sqrt(exp_avg_sq) * (1 / sqrt(1 - beta2**t)) + eps
        param := param * (1 - lr * weight_decay) - lr / (1 - beta1**t) * (exp_avg / denominator)

    where the factor of param is 1 unless decoupled. Source: torch/optim/adam.py.
    """
    factors = _factors(lr, maximize, tensor_lr, found_inf, inv_scale, norm, max_norm)
    if factors is None:
        return
    l2 = 0.0 if decoupled else weight_decay
    keep = _fp32(1 - factors.lr * weight_decay if decoupled else 1.0, params)
    for i, step in enumerate(steps):
        param, exp_avg, exp_avg_sq = _flat(params[i]), _flat(exp_avgs[i]), _flat(exp_avg_sqs[i])
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
        root = second.double().sqrt().float()  # torch's root in fp32 may be off by one unit
        new = param.float() * keep - step_size * (first / (root * inv_root + eps))
        _store(param, new, noise, copies[i] if copies else None)
        step += 1


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor] | None = None,
    steps: list[Tensor] | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    copies: list[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Update parameters by gradient descent with momentum.

    With g the gradient, unscaled, clipped and negated to maximize:

        g := g + weight_decay * param
        buffer := momentum * buffer + (1 - dampening) * g        g where it is the first update
        param := param - lr * (g + momentum * buffer if nesterov else buffer)

    and g instead of the buffer without momentum. Source: torch/optim/sgd.py.
    """
    factors = _factors(lr, maximize, tensor_lr, found_inf, inv_scale, norm, max_norm)
    if factors is None:
        return
    rate = _fp32(factors.lr, params)
    for i, tensor in enumerate(params):
        param = _flat(tensor)
        update = _update_number(steps[i]) if steps else 0
        noise = _Noise(stochastic_rounding, update, i, param)
        g = _gradient(tensor, grads[i], factors, weight_decay)
        if momentum_buffers:
            buffer = _flat(momentum_buffers[i])
            new = g if update == 1 else buffer.float() * momentum + g * (1 - dampening)
            buffer.copy_(noise.rounded(new, buffer.dtype, 0, 16))
            g = g + new * momentum if nesterov else new
        _store(param, param.float() - rate * g, noise, copies[i] if copies else None)
        if steps:
            steps[i].add_(1)


class _Factors(NamedTuple):
    lr: float
    inv_scale: float
    coefficient: float
    """Of clipping; negative to maximize."""


def _factors(
    lr: float,
    maximize: bool,
    tensor_lr: Tensor | None,
    found_inf: Tensor | None,
    inv_scale: Tensor | None,
    norm: Tensor | None,
    max_norm: float | None,
) -> _Factors | None:
    """Return what is the same for all parameters; None where there is no update."""
    coefficient = 1.0
    if norm is not None:
        if not torch.isfinite(norm):
            if found_inf is not None:
                found_inf.fill_(1.0)
            return None
        coefficient = clip_coefficient(norm, math.inf if max_norm is None else max_norm).item()
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


def _fp32(value: float, like: list[Tensor]) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like[0].device if like else None)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _gradient(param: Tensor, grad: Tensor, factors: _Factors, l2: float) -> Tensor:
    in_order = torch.empty_strided(
        param.shape, param.stride(), dtype=torch.float32, device=param.device
    )
    g = _flat(in_order.copy_(grad)) * factors.inv_scale * factors.coefficient
    return (
        g + _flat(param).float() * l2
        if torch.tensor(l2, dtype=torch.float32, device="cpu") != 0
        else g
    )


def _store(param: Tensor, new: Tensor, noise: _Noise, copy: Tensor | None) -> None:
    param.copy_(noise.rounded(new, param.dtype, 0, 0))
    if copy is not None:
        _flat(copy).copy_(new)


class _Noise:
    """Random bits for the elements of a tensor, a function of their places and the update."""

    def __init__(self, on: bool, update: int, tensor: int, elements: Tensor) -> None:
        self.key: Tensor | None = None
        if on:
            self.index = torch.arange(elements.numel(), device=elements.device)
            seed = _mixed(_mixed(torch.tensor(update, device="cpu")) + tensor).to(elements.device)
            self.key = _mixed(seed + self.index // CHUNK)

    def rounded(self, value: Tensor, dtype: torch.dtype, pair: int, shift: int) -> Tensor:
        """Round, to bf16 by chance: up with the probability of the part that is cut off."""
        if self.key is None or dtype != torch.bfloat16:
            return value.to(dtype)
        place = (2 * (self.index % CHUNK) + pair) * 0x9E3779B9
        noise = (_mixed(self.key + place) >> shift) & 0xFFFF
        bits = ((value.view(torch.int32).long() & 0xFFFFFFFF) + noise) >> 16
        signed = torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16)
        return torch.where(value.isfinite(), signed.view(torch.bfloat16), value.bfloat16())


def _mixed(x: Tensor) -> Tensor:
    """Return the last step of MurmurHash3, of 32-bit numbers."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
