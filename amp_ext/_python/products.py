"""The matrix products, of torch's differentiable ops: 16-bit operands are multiplied as they are
where torch has a product of them with FP32 sums in an FP32 result, on a GPU, else in FP32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amp_ext._python.checks import (
    DTYPES,
    HALVES,
    Arguments,
    check_device,
    check_no_history,
    check_not_negated,
    checked_span,
    type_name,
)

GEMM, WITH_AUX = "amp_ext::gemm", "amp_ext::gemm_with_aux"
TIMES_DERIVATIVE, ACCUMULATE = "amp_ext::gemm_times_derivative", "amp_ext::gemm_accumulate_"
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
FLT_MAX = torch.finfo(torch.float32).max


# ---- a product and its gradients ---------------------------------------------------------------


class _Product(torch.autograd.Function):
    """a @ b, rounded once to a dtype, of two matrices or two batches of them; first rounded to the
    dtype of a cast, if there is one. Gradients have the dtypes of a and b, and never pass through
    another."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, cast: torch.dtype | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.cast = cast
        return _multiply(_cast(a, cast), _cast(b, cast), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wants_a, wants_b, *_ = ctx.needs_input_grad
        of_a = _product(grad, _cast(b, ctx.cast).mT, a.dtype) if wants_a else None
        of_b = _product(_cast(a, ctx.cast).mT, grad, b.dtype) if wants_b else None
        return of_a, of_b, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, cast: torch.dtype | None = None) -> Tensor:
    return _Product.apply(a, b, cast, dtype)


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    half = a.dtype == b.dtype and a.dtype in HALVES and a.is_cuda
    if half and dtype == a.dtype:
        return a @ b
    sums = sums_dtype(a, b)
    if half:
        multiply = torch.bmm if a.dim() == 3 else torch.mm
        return multiply(a, b, out_dtype=torch.float32).to(dtype)
    return (a.to(sums) @ b.to(sums)).to(dtype)


def sums_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    double = torch.float64 in (a.dtype, b.dtype)
    return torch.float64 if double else torch.float32


class _Activation(torch.autograd.Function):
    """Its derivative at infinities is 0 or 1, where torch's is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return _activated(x, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _times_derivative(grad, ctx.saved_tensors[0], ctx.activation), None


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return x.relu()
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _times_derivative(y: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return y
    return torch.where(x <= 0, 0.0, y) if activation == "relu" else y * _slope(x, activation)


def _slope(x: Tensor, activation: str) -> Tensor:
    # Beyond, it is 0 or 1. Unlike a clamp's, the derivative of a hardtanh at NaN is NaN.
    bound = 1e3 if activation == "silu" else 40.0
    x = F.hardtanh(x, -bound, bound)
    if activation == "silu":
        sigmoid, rest = x.sigmoid(), (-x).sigmoid()  # one minus the sigmoid would cancel
        return sigmoid + x * sigmoid * rest
    if activation == "gelu":
        density = (-0.5 * x * x).exp() / math.sqrt(2 * math.pi)
        return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * density
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    tanh = inner.tanh()
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope


# ---- the ops -----------------------------------------------------------------------------------


def gemm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return _gemm(GEMM, a, b, **options)[0]


def gemm_with_aux(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _gemm(WITH_AUX, a, b, **options)


def _gemm(
    op: str,
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
    cast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, and what the activation is applied to, in the result's dtype."""
    out_dtype = _result_dtype(a, b, out_dtype)
    shape = _check_gemm(
        op, a, b, trans_a, trans_b, sum_batch, (c, alpha, beta), bias, activation, out_dtype
    )
    plain = alpha == 1 and bias is None and activation == "none" and (c is None or beta == 0)
    sums = sums_dtype(a, b)
    x = _matrices(a, b, trans_a, trans_b, sum_batch, out_dtype if plain else sums, cast)
    if plain:
        return (x := x.reshape(shape)), x
    x = x.reshape(shape)
    if alpha != 1:
        x = x * alpha
    if bias is not None:
        x = x + bias
    if c is not None and beta != 0:
        x = x + beta * c.to(sums)
    x = x.to(sums)
    out = x if activation == "none" else _Activation.apply(x, activation)
    return out.to(out_dtype), x.to(out_dtype)


def _matrices(
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    sum_batch: bool,
    dtype: torch.dtype,
    cast: torch.dtype | None = None,
) -> Tensor:
    """A @ B, whose leading dimensions are one, or in the rows."""
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    if sum_batch:  # one long product
        a, b = a.movedim(-2, 0).flatten(1), b.flatten(0, -2)
    if a.dim() > 2 and b.dim() > 2:
        return _product(a.flatten(0, -3), b.flatten(0, -3), dtype, cast)
    if b.dim() > 2:  # A @ B of a shared A is the transpose of B.T @ A.T
        rows = _product(b.mT.flatten(0, -2), a.mT, dtype, cast)
        return rows.unflatten(0, (-1, b.shape[-1]) if b.numel() else b.mT.shape[:-1]).mT
    return _product(a.flatten(0, -2), b, dtype, cast)


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
    op = TIMES_DERIVATIVE
    out_dtype = _result_dtype(a, b, out_dtype)
    none = None, 1.0, 1.0
    shape = _check_gemm(op, a, b, trans_a, trans_b, False, none, None, activation, out_dtype)
    _check_operand(op, "aux", aux, a.device)
    _check_shape(op, "aux", aux, shape)
    _check_memory(op, aux=aux)
    _check_no_gradient(op, a, b, aux)
    sums = sums_dtype(a, b)
    y = _matrices(a, b, trans_a, trans_b, False, sums).reshape(shape)
    y = _times_derivative(y, aux.to(sums), activation)
    return y.to(out_dtype), y.flatten(0, -2).sum(0)


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
    _check_accumulate(c, a, b, trans_a, trans_b, sum_batch, alpha)
    given = Arguments(ACCUMULATE, c.device)
    given.add("c", checked_span(ACCUMULATE, "c", c), written=True)
    for name, operand in (("a", a), ("b", b)):
        given.add(name, checked_span(ACCUMULATE, name, operand), written=False)
    product = _matrices(a, b, trans_a, trans_b, sum_batch, sums_dtype(a, b)).reshape(c.shape)
    c.copy_(c + product * alpha)
    if not c.is_inference():
        torch.autograd.graph.increment_version(c)


def gemm_accumulate_fake(c: Tensor, a: Tensor, b: Tensor, **options: Any) -> None:
    defaults = {"trans_a": False, "trans_b": False, "sum_batch": False, "alpha": 1.0}
    _check_accumulate(c, a, b, **{**defaults, **options})


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    accumulate_grad: bool = False,
) -> Tensor:
    op = "amp_ext::linear"
    _check_operand(op, "x", x, x.device)
    _check_activation(op, activation)
    _check_layer(op, ("x", x, -1), ("weight", weight), ("bias", bias))
    return _layer(x, weight, bias, activation)


def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "gelu",
    accumulate_grad: bool = False,
) -> Tensor:
    op = "amp_ext::mlp"
    _check_operand(op, "x", x, x.device)
    _check_activation(op, activation)
    _check_layer(op, ("x", x, -1), ("weight1", weight1), ("bias1", bias1))
    _check_layer(op, ("weight1", weight1, 0), ("weight2", weight2), ("bias2", bias2))
    return _layer(_layer(x, weight1, bias1, activation), weight2, bias2)


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
    accumulate_grad: bool = False,
) -> Tensor:
    op = "amp_ext::gated_mlp"
    _check_operand(op, "x", x, x.device)
    _check_activation(op, activation)
    _check_layer(op, ("x", x, -1), ("gate_weight", gate_weight), ("gate_bias", gate_bias))
    _check_layer(op, ("x", x, -1), ("up_weight", up_weight), ("up_bias", up_bias))
    if up_weight.shape[0] != gate_weight.shape[0]:
        raise RuntimeError(
            f"{op}: up_weight must have the shape of gate_weight, {list(gate_weight.shape)}, "
            f"got shape {list(up_weight.shape)}"
        )
    _check_layer(
        op, ("up_weight", up_weight, 0), ("down_weight", down_weight), ("down_bias", down_bias)
    )
    gate = _layer(x, gate_weight, gate_bias, activation)
    return _layer(gate * _layer(x, up_weight, up_bias), down_weight, down_bias)


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    cast, out_dtype = _region_dtype(x.device.type), None
    if cast is not None:
        operands = [t for t in (x, weight) if t.dtype != torch.float64]
        out_dtype = cast if len(operands) == 2 else torch.float64
    options = {"trans_b": True, "bias": bias, "activation": activation}
    out = _gemm(GEMM, rows, weight, **options, out_dtype=out_dtype, cast=cast)[0]
    return out.squeeze(0) if x.dim() == 1 else out


def _region_dtype(device_type: str) -> torch.dtype | None:
    """To what torch's autocast casts the operands of a linear layer."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


# ---- checks ------------------------------------------------------------------------------------


def _result_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return torch.promote_types(a.dtype, b.dtype) if out_dtype is None else out_dtype


def _check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"{op}: {name} must be float16, bfloat16, float32 or float64, got {type_name(dtype)}"
        )


def _check_operand(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    check_device(op, name, tensor, device)
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{op}: {name} must be a strided tensor, got layout {tensor.layout}"
        )
    _check_dtype(op, name, tensor.dtype)


def _check_memory(op: str, **tensors: Tensor | None) -> None:
    """Of tensors with data."""
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            continue
        if torch._C._has_storage(tensor) and not torch._is_functional_tensor(tensor):
            checked_span(op, name, tensor)


def _check_activation(op: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got '{activation}'"
        )


def _check_factor(op: str, name: str, factor: float, sums: torch.dtype) -> None:
    if sums == torch.float32 and math.isfinite(factor) and abs(factor) > FLT_MAX:
        raise RuntimeError(
            f"{op}: {name} must be at most {FLT_MAX:g} in magnitude, since the product is summed "
            f"in float32, got {factor:g}"
        )


def _check_shape(op: str, name: str, tensor: Tensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        raise RuntimeError(
            f"{op}: {name} must have the shape of the result, {shape}, got shape "
            f"{list(tensor.shape)}"
        )


def _check_no_gradient(op: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{op}: is not differentiable, expected no tensor that requires a gradient: call it "
            "under torch.no_grad()"
        )


def _check_gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    sum_batch: bool,
    addend: tuple[Tensor | None, float, float],
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> list[int]:
    """The shape of the result."""
    c, alpha, beta = addend
    _check_operand(op, "a", a, a.device)
    _check_operand(op, "b", b, a.device)
    _check_activation(op, activation)
    _check_dtype(op, "out_dtype", out_dtype)
    _check_factor(op, "alpha", alpha, sums_dtype(a, b))
    _check_factor(op, "beta", beta, sums_dtype(a, b))
    shape = _check_shapes(op, a, b, trans_a, trans_b, sum_batch)
    if bias is not None:
        _check_operand(op, "bias", bias, a.device)
        if list(bias.shape) != shape[-1:]:
            raise RuntimeError(
                f"{op}: bias must have shape [{shape[-1]}], got shape {list(bias.shape)}"
            )
    if c is not None:
        _check_operand(op, "c", c, a.device)
        sizes = zip(reversed(c.shape), reversed(shape), strict=False)
        if c.dim() > len(shape) or any(size not in (1, whole) for size, whole in sizes):
            raise RuntimeError(
                f"{op}: c must be expandable to the result's shape {shape}, "
                f"got shape {list(c.shape)}"
            )
    _check_memory(op, a=a, b=b, bias=bias, c=c)
    return shape


def _check_shapes(
    op: str, a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, sum_batch: bool
) -> list[int]:
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{op}: {name} must have at least 2 dimensions, got shape {list(tensor.shape)}"
            )
    m, k = reversed(a.shape[-2:]) if trans_a else a.shape[-2:]
    rows, n = reversed(b.shape[-2:]) if trans_b else b.shape[-2:]
    shapes = list(a.shape), list(b.shape)
    if k != rows:
        raise RuntimeError(
            f"{op}: a of shape {shapes[0]}{' (transposed)' if trans_a else ''} needs a b of {k} "
            f"{'columns' if trans_b else 'rows'}, got shape {shapes[1]}"
        )
    leading = [shape[:-2] for shape in shapes]
    if all(leading) and leading[0] != leading[1]:
        raise RuntimeError(
            f"{op}: leading dimensions of a and b must be equal, or absent in one, got shapes "
            f"{shapes[0]} and {shapes[1]}"
        )
    if sum_batch and not all(leading):
        raise RuntimeError(
            f"{op}: sum_batch needs leading dimensions in a and b, got shapes {shapes[0]} and "
            f"{shapes[1]}"
        )
    return [*([] if sum_batch else leading[0] or leading[1]), m, n]


def _check_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    sum_batch: bool,
    alpha: float,
) -> None:
    op = ACCUMULATE
    dtype = _result_dtype(a, b, None)
    none = None, alpha, 1.0
    shape = _check_gemm(op, a, b, trans_a, trans_b, sum_batch, none, None, "none", dtype)
    _check_operand(op, "c", c, a.device)
    check_not_negated(op, "c", c)
    if c.dtype != torch.float32:
        raise RuntimeError(f"{op}: c must be a float tensor, got {type_name(c.dtype)}")
    _check_shape(op, "c", c, shape)
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        check_no_history(op, name, tensor)
    extent = 1
    for size, stride in reversed([*zip(c.shape, c.stride(), strict=True)][:-1]):
        if c.numel() and size > 1 and stride < extent:
            extent = -1
            break
        extent = max(extent, stride * size)
    if c.numel() and (extent < 0 or (c.shape[-1] > 1 and c.stride(-1) != 1)):
        raise RuntimeError(
            f"{op}: c must be row-major with a column stride of 1, its leading dimensions one "
            f"after another, got strides {list(c.stride())}"
        )


def _check_layer(
    op: str,
    entering: tuple[str, Tensor, int],
    weight: tuple[str, Tensor],
    bias: tuple[str, Tensor | None],
) -> None:
    (entering_name, x, dim), (name, w), (bias_name, addend) = entering, weight, bias
    _check_operand(op, name, w, x.device)
    if addend is not None:
        _check_operand(op, bias_name, addend, x.device)
    if w.dim() != 2:
        raise RuntimeError(f"{op}: {name} must have 2 dimensions, got shape {list(w.shape)}")
    if x.dim() < 1 or x.shape[dim] != w.shape[1]:
        raise RuntimeError(
            f"{op}: {entering_name} must have {w.shape[1]} {'columns' if dim else 'rows'} for "
            f"{name} of shape {list(w.shape)}, got shape {list(x.shape)}"
        )
    if addend is not None and list(addend.shape) != [w.shape[0]]:
        raise RuntimeError(
            f"{op}: {bias_name} must have shape [{w.shape[0]}], got shape {list(addend.shape)}"
        )
