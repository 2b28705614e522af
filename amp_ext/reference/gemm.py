"""The oracle of the matrix products."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "gated_mlp",
    "gemm",
    "gemm_accumulate_",
    "gemm_times_derivative",
    "gemm_with_aux",
    "linear",
    "mlp",
]


def gemm_with_aux(
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    sum_batch: bool = False,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (round(act(x)), round(x)), x = alpha * A @ B + beta * c + bias."""
    x = _sum(a, b, trans_a, trans_b, sum_batch, c, alpha, beta, bias)
    dtype = _result_type(a, b, out_dtype)
    return _activated(x, activation).to(dtype), x.to(dtype)


def gemm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Return round(act(alpha * A @ B + beta * c + bias)), computed in fp64 and rounded once.

    act is the identity; "relu", max(x, 0), NaN for NaN; "gelu", x * Phi(x), Phi the normal
    distribution; "gelu_tanh", torch's approximation of that; or "silu", x / (1 + exp(-x)). With
    beta = 0 c is not read.
    """
    return gemm_with_aux(a, b, **options)[0]


gemm.__signature__ = signature(gemm_with_aux).replace(return_annotation=Tensor)


def gemm_times_derivative(
    a: Tensor,
    b: Tensor,
    aux: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return round(y) and the sums of y's columns, y = (A @ B) * act'(aux). For relu y is A @ B, or
    0 where aux <= 0; an infinite aux stands for the limit. The sums are fp32 or, when a or b is
    fp64, fp64.
    """
    y = _sum(a, b, trans_a, trans_b)
    if activation == "relu":
        y = torch.where(aux <= 0, 0.0, y)
    else:
        # Beyond 800 even exp(-aux) is 0 in fp64.
        at = aux.detach().double().clamp(-800, 800).requires_grad_()
        with torch.enable_grad():
            (derivative,) = torch.autograd.grad(_activated(at, activation).sum(), at)
        y = y * derivative
    sums_dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return y.to(_result_type(a, b, out_dtype)), y.flatten(0, -2).sum(0).to(sums_dtype)


def gemm_accumulate_(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    sum_batch: bool = False,
    alpha: float = 1.0,
) -> None:
    """Write round(c + alpha * A @ B) to c."""
    c.copy_(c.double() + _sum(a, b, trans_a, trans_b, sum_batch, alpha=alpha))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
) -> Tensor:
    """Return round(act(x @ weight.T + bias)): `gemm` with b = weight and trans_b."""
    return gemm(x, weight, trans_b=True, bias=bias, activation=activation)


def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "gelu",
) -> Tensor:
    """Return `linear` of `linear`: the hidden layer is rounded to the dtype of its own result."""
    return linear(linear(x, weight1, bias1, activation=activation), weight2, bias2)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str = "silu",
) -> Tensor:
    """Return `linear` of the product of two results of `linear`, the first one activated."""
    factor = linear(x, gate_weight, gate_bias, activation=activation)
    return linear(factor * linear(x, up_weight, up_bias), down_weight, down_bias)


def _sum(
    a: Tensor,
    b: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    sum_batch: bool = False,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return alpha * A @ B + beta * c + bias in fp64, the factors as numbers of the op's sum."""
    sums = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    alpha, beta_of_sum = torch.tensor([alpha, beta], dtype=sums, device="cpu").tolist()
    left = a.double().mT if trans_a else a.double()
    right = b.double().mT if trans_b else b.double()
    product = left @ right
    if sum_batch:
        product = product.flatten(0, -3).sum(0)
    result = alpha * product
    if c is not None and beta != 0:
        result = result + beta_of_sum * c.double()
    if bias is not None:
        result = result + bias.double()
    return result


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return x
    if activation == "relu":
        return x.relu()
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _result_type(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return torch.promote_types(a.dtype, b.dtype) if out_dtype is None else out_dtype
