"""The ops of matrix products; amp_ext.ops has them all."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from amp_ext.ops import _checkpoint, _flops, _sharding  # noqa: F401  (tell torch of them)
from amp_ext.ops._op import op

__all__ = [  # noqa: RUF022
    "gemm",
    "gemm_with_aux",
    "gemm_times_derivative",
    "gemm_accumulate_",
    "linear",
    "mlp",
    "gated_mlp",
]


@op
def gemm(
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
) -> Tensor:
    """The matrix product ``act(alpha * A @ B + beta * c + bias)``, accumulated in float32.

    A is ``a``, or ``a`` with its last two dimensions swapped when ``trans_a``; B likewise. Dtypes
    may be mixed: operands are not rounded to a common one, all terms are added up in float32, and
    the sum is rounded once, to ``out_dtype``. With a float64 operand the sum is in float64.

    Differentiable, twice too, in ``a``, ``b``, ``c`` and ``bias``. Each gradient is accumulated in
    the same way and has the dtype of its tensor: that of a float32 weight beside float16
    activations never passes through float16.

    Args:
        a: float16, bfloat16, float32 or float64, any strides. A is [*, m, k].
        b: likewise. B is [*, k, n]. Leading dimensions are equal, or absent in one of the two,
            which is then shared by the whole batch.
        trans_a: ``a`` is [*, k, m].
        trans_b: ``b`` is [*, n, k].
        sum_batch: the products are summed over the leading dimensions, which ``a`` and ``b`` both
            must have.
        c: float16, bfloat16, float32 or float64, broadcastable to the result. It enters the sum in
            the sum's dtype, and is not read when ``beta`` is 0.
        alpha: factor of the product, rounded to the sum's dtype. NaN and infinities times 0 are
            NaN.
        beta: factor of ``c``, likewise.
        bias: [n], dtypes as of ``c``.
        activation: "none", "relu", which keeps NaN, "gelu", its approximation "gelu_tanh", or
            "silu", as in :func:`torch.nn.functional.gelu` and ``silu``; applied to the sum before
            that is rounded, unless torch's library computes it in 16 bits (on a CPU with
            instructions for that).
        out_dtype: float16, bfloat16, float32 or float64; ``torch.promote_types(a.dtype, b.dtype)``
            when None.

    Returns:
        A new tensor of shape [*, m, n], or [m, n] when ``sum_batch``; bitwise the same in every
        run. A sum of no products is 0: act(beta * c + bias) is returned.

    Raises:
        RuntimeError: shapes that do not fit, operands on several devices, or an ``alpha`` or
            ``beta`` beyond the range of the sum's dtype.
        NotImplementedError: a tensor that is not strided, or another dtype than the above.
        ValueError: another activation.
    """


@op
def gemm_with_aux(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """:func:`gemm`, and what its activation was applied to, of one product.

    :func:`gemm` with a gelu or silu uses it where gradients are needed. Differentiable twice.

    Args:
        a, b: as for :func:`gemm`.
        options: those of :func:`gemm`.

    Returns:
        (out, aux): the result of :func:`gemm`, and alpha * A @ B + beta * c + bias, of the same
        shape and dtype, each rounded once.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`gemm`. RuntimeError too when a
            tensor requires a gradient, outside of ``torch.no_grad()``.
    """


gemm_with_aux.__signature__ = signature(gemm).replace(return_annotation=tuple[Tensor, Tensor])


@op
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
    """``(A @ B) * act'(aux)`` and its column sums: a layer's backward pass through an activation.

    With ``a`` the gradient of what a layer makes of its input and ``b`` the layer's weight, the
    product is the gradient of that input. Where it is act(aux), the result is the gradient of aux,
    and its column sums are that of a bias in aux. Not differentiable.

    Args:
        a, b, trans_a, trans_b, out_dtype: as for :func:`gemm`.
        aux: float16, bfloat16, float32 or float64, of the result's shape; what
            :func:`gemm_with_aux` returned.
        activation: as for :func:`gemm`. The derivative of "relu" is 0 where ``aux <= 0``, else 1;
            those of the gelus and of "silu" are 1 at +inf and 0 at -inf.

    Returns:
        (out, column_sums): the product in the sum's dtype, rounded once; and the sums of its
        columns before that rounding, over rows and leading dimensions, [n] in the sum's dtype,
        which is float32, or float64 when ``a`` or ``b`` is. Bitwise the same in every run. (What
        torch's library computes in bfloat16 is rounded before too, as in :func:`gemm`.)

    Raises:
        RuntimeError: shapes that do not fit, several devices, or a tensor that requires a gradient,
            outside of ``torch.no_grad()``.
        NotImplementedError, ValueError: as :func:`gemm`.
    """


@op
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
    """``c += alpha * A @ B`` in place and in float32: a weight's gradient added to the last one.

    Args:
        c: float32, of the product's shape: [*, m, n], or [m, n] when ``sum_batch``. Row-major with
            a column stride of 1; rows may have gaps between them, and so may matrices, but leading
            dimensions follow one another. It shares no memory with the other arguments.
        a, b, trans_a, trans_b, sum_batch: as for :func:`gemm`.
        alpha: factor of the product.

    The sum is computed in float32 (in float64 when ``a`` or ``b`` is float64) and added to ``c``
    whole or in parts, each addition rounded to float32. Bitwise the same in every run.

    Not differentiable: a call with tensors that require gradients, ``c`` among them, has to be
    under ``torch.no_grad()``.

    Raises:
        RuntimeError: shapes that do not fit, tensors on several devices, a ``c`` of another shape,
            dtype or layout or that overlaps another argument, or a tensor that requires a gradient,
            outside of ``torch.no_grad()``.
        NotImplementedError: as :func:`gemm`.
    """


@op
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
) -> Tensor:
    """``act(x @ weight.T + bias)``: :func:`gemm` with the weight as ``torch.nn.Linear`` stores it.

    Under autocast, torch's or :class:`amp_ext.autocast`, operands are cast as those of
    ``torch.nn.functional.linear`` are, and the gradient of a float32 weight stays float32. So does
    that of a 16-bit leaf whose ``grad_dtype`` is ``torch.float32`` or None, though not when
    compiled.

    Args:
        x: [*, k], also [k]; float16, bfloat16, float32 or float64, any strides.
        weight: [n, k], likewise.
        bias: [n], of any of these dtypes.
        activation: as for :func:`gemm`.

    Returns:
        A new tensor of shape [*, n] and dtype ``torch.promote_types(x.dtype, weight.dtype)``.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`gemm`.
    """


@op
def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "gelu",
) -> Tensor:
    """``act(x @ weight1.T + bias1) @ weight2.T + bias2``, two layers as one node of the graph.

    Forward keeps what the activation is applied to beside what it makes of it, of one product. In
    the backward pass its derivative and the gradient of ``bias1`` come with the product of the
    gradient and ``weight2`` (:func:`gemm_times_derivative`). Differentiable twice.

    Args:
        x: [*, k], also [k]; float16, bfloat16, float32 or float64, any strides.
        weight1: [h, k], likewise.
        bias1: [h], of any of these dtypes.
        weight2: [n, h].
        bias2: [n].
        activation: as for :func:`gemm`.

    Returns:
        A new tensor of shape [*, n] and the dtype to which ``x`` and the weights promote.

    Under autocast operands are cast as in :func:`linear`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`gemm`.
    """


@op
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
    """``hidden @ down_weight.T + down_bias``, three layers as one node of the graph.

    ``hidden = act(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)``, SwiGLU with the
    default. Forward keeps the two factors, the first as it is before the activation (for "relu",
    after it); the backward pass computes ``hidden`` again. Differentiable twice.

    Args:
        x: [*, k], also [k]; float16, bfloat16, float32 or float64, any strides.
        gate_weight: [h, k], likewise.
        gate_bias: [h], of any of these dtypes.
        up_weight: [h, k].
        up_bias: [h].
        down_weight: [n, h].
        down_bias: [n].
        activation: as for :func:`gemm`.

    Returns:
        A new tensor of shape [*, n] and the dtype to which ``x`` and the weights promote.

    Under autocast operands are cast as in :func:`linear`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`gemm`.
    """
