"""Define the ops of matrix products.

Each function's body is the op's reference: computed in float64, gradients too, and rounded once. An
op sums in float32 in an order of its own. It agrees with the reference to the rounding error of
such sums. If float32 represents every partial sum, the two agree bit for bit.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext._library import _C
from amp_ext.ops._numbers import BF16, FP16, FP32, INF, NAN, counted, integers
from amp_ext.ops._op import Case, cases, op

__all__ = ["gemm", "gemm_accumulate_"]


@op()
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
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``alpha * A @ B + beta * c + bias``, accumulated in float32.

    A is ``a``, or ``a`` with its last two dimensions swapped when ``trans_a``; B likewise. Dtypes
    may be mixed: operands are not rounded to a common one, all terms are added up in float32, and
    the sum is rounded once, to ``out_dtype``. A float64 operand makes the sum float64.

    The op is differentiable, twice too, in ``a``, ``b``, ``c`` and ``bias``. Each gradient is
    accumulated in the same way and has the dtype of its tensor. The gradient of a float32 weight
    beside float16 activations never passes through float16.

    Args:
        a: float16, bfloat16, float32 or float64, any strides. A is [*, m, k].
        b: likewise. B is [*, k, n]. Leading dimensions are equal, or absent in one of the two: the
            whole batch shares that one then.
        trans_a: ``a`` is [*, k, m].
        trans_b: ``b`` is [*, n, k].
        sum_batch: the products are summed over the leading dimensions. Both ``a`` and ``b`` must
            have leading dimensions then.
        c: float16, bfloat16, float32 or float64, broadcastable to the result. It enters the sum in
            the sum's dtype, and is not read when ``beta`` is 0.
        alpha: factor of the product, rounded to the sum's dtype. NaN and infinities times 0 are
            NaN.
        beta: factor of ``c``, likewise.
        bias: [n], dtypes as of ``c``.
        out_dtype: float16, bfloat16, float32 or float64; ``torch.promote_types(a.dtype, b.dtype)``
            when None.

    Returns:
        A new tensor of shape [*, m, n], or [m, n] when ``sum_batch``; bitwise the same in every
        run. A sum of no products is 0: beta * c + bias is returned.

    Raises:
        RuntimeError: shapes that do not fit, operands on several devices, or an ``alpha`` or
            ``beta`` beyond the range of the sum's dtype.
        NotImplementedError: a tensor that is not strided, or another dtype than the above.
    """
    operands = torch.promote_types(a.dtype, b.dtype)
    sums = torch.promote_types(operands, torch.float32)
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
    return result.to(operands if out_dtype is None else out_dtype)


@cases(gemm)
def _gemm_cases() -> Iterator[Case]:
    terms = {"c": counted(3, 1).double(), "bias": counted(5), "alpha": 2.0, "beta": -1.0}
    arguments = {**_example_operands(), **terms, "out_dtype": FP32}
    yield Case("the example", arguments)


@op("c")
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
    """Add ``alpha * A @ B`` to ``c`` in place and in float32.

    Args:
        c: float32, of the product's shape: [*, m, n], or [m, n] when ``sum_batch``. Row-major with
            a column stride of 1; rows may have gaps between them, and so may matrices, but leading
            dimensions follow one another. It shares no memory with the other arguments.
        a, b, trans_a, trans_b, sum_batch: as for :func:`gemm`.
        alpha: factor of the product.

    The sum is computed in float32 (in float64 when ``a`` or ``b`` is float64) and added to ``c``
    whole or in parts, each addition rounded to float32. Bitwise the same in every run.
    The op is not differentiable: a call with tensors that require gradients, ``c`` among them, has
    to be under ``torch.no_grad()``.

    Raises:
        RuntimeError: shapes that do not fit; tensors on several devices; a ``c`` of another shape,
            dtype or layout, or one that overlaps another argument. A tensor that requires a
            gradient raises it too, outside of ``torch.no_grad()``.
        NotImplementedError: as :func:`gemm`.
    """
    options = {"trans_a": trans_a, "trans_b": trans_b, "sum_batch": sum_batch, "alpha": alpha}
    product = vars(gemm)["reference"](a, b, **options, out_dtype=torch.float64)
    c.copy_(c.double() + product)


@cases(gemm_accumulate_)
def _gemm_accumulate_cases() -> Iterator[Case]:
    yield Case("the example", {"c": counted(2, 3, 5), **_example_operands(), "alpha": 2.0})


def _example_operands() -> dict[str, Any]:
    return {"a": counted(2, 3, 4), "b": counted(5, 4).half(), "trans_b": True}


_TRANSPOSES = list(itertools.product((False, True), repeat=2))
_CASES_OF_TRITON = (
    "layout NN, a long sum",
    "layout TN, unaligned",
    "epilogue into torch.float32",
    "the sum of a batch",
)


class Plan(NamedTuple):
    """Compute products by a backend and one of its variants, whatever the ops would choose."""

    backend: str
    variant: int = 0

    def gemm(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return _C.Product(a, b, **options).compute(*self)

    def gemm_accumulate_(self, c: Tensor, a: Tensor, b: Tensor, **options: Any) -> None:
        _C.Product(a, b, c=c, **options, accumulates=True).compute(*self)


def product_cases(dtype: torch.dtype, backend: str, is_sm90: bool) -> Iterator[Case]:
    """Yield the cases of the products of one operand dtype.

    The CUDA kernels are called with each tile too, and on 9.0 all products also with tiles for
    sm_80. Triton has a few kinds of product, since each kind takes seconds to compile.
    """
    plans = [Plan(backend)]
    if backend == "cuda" and is_sm90:
        plans += [Plan("cuda", _C.gemm_variant(*tile, sm90=False)) for tile in ((0, 1), (4, 4))]
    for case in _products(dtype):
        if backend != "triton" or case.what in _CASES_OF_TRITON:
            yield case._replace(plans=plans)
    if backend == "cuda":
        yield from _tiles(dtype, sm90=False)
        if is_sm90:
            yield from _tiles(dtype, sm90=True)


def _operands(
    m: int, n: int, k: int, dtype: torch.dtype, trans_a: bool, trans_b: bool, skip: int = 0
) -> dict[str, Any]:
    """Return small integers: each sum of up to 2**20 products is a number of float32."""

    def matrix(*shape: int) -> Tensor:
        memory = torch.zeros(shape[0] * shape[1] + skip, dtype=dtype, device="cpu")
        return memory[skip:].view(shape).copy_(integers(*shape, limit=4))

    a = matrix(k, m) if trans_a else matrix(m, k)
    b = matrix(n, k) if trans_b else matrix(k, n)
    return {"a": a, "b": b, "trans_a": trans_a, "trans_b": trans_b}


def _products(dtype: torch.dtype) -> Iterator[Case]:
    for trans_a, trans_b in _TRANSPOSES:
        layout = f"layout {'NT'[trans_a]}{'NT'[trans_b]}"
        for what, *shape, skip in (
            ("", 136, 264, 72, 0),
            (", unaligned", 67, 45, 35, 1),
            (", a long sum", 16, 24, 2056, 0),
        ):
            operands = _operands(*shape, dtype, trans_a, trans_b, skip)
            yield Case(layout + what, {**operands, "out_dtype": FP32}, op="gemm")

    operands = _operands(70, 72, 136, dtype, False, True)
    addend, bias = integers(70, 72, limit=9), integers(72, limit=9)
    for out in (FP32, FP16, BF16):
        terms = {"c": addend.to(out), "alpha": 0.5, "beta": 2.0, "bias": bias.to(out)}
        yield Case(f"epilogue into {out}", {**operands, **terms, "out_dtype": out}, op="gemm")

    c = torch.full((70, 80), 3.0, dtype=FP32, device="cpu")[:, :72]
    yield Case("added in memory", {**operands, "c": c}, op="gemm_accumulate_")
    a, b = (integers(3, rows, 40, limit=4).to(dtype) for rows in (33, 24))
    batch = {"a": a, "b": b, "trans_b": True, "out_dtype": FP32}
    yield Case("a batch", batch, op="gemm")
    yield Case("the sum of a batch", {**batch, "sum_batch": True}, op="gemm")
    spoiled = a.clone()
    spoiled[1, 32, 39], spoiled[2, 0, 0] = NAN, INF
    yield Case("infinities and NaNs", {**batch, "a": spoiled}, op="gemm")


def _tiles(dtype: torch.dtype, sm90: bool) -> Iterator[Case]:
    """Yield products of several tiles, by each tile of a kernel."""
    tiles = list(itertools.takewhile(lambda i: _C.gemm_variant(i, 1, sm90), itertools.count()))
    plans = [Plan("cuda", _C.gemm_variant(i, 1 + i % 2, sm90)) for i in tiles]
    for trans_a, trans_b in _TRANSPOSES:
        operands = _operands(264, 264, 136, dtype, trans_a, trans_b)
        what = f"each tile, layout {'NT'[trans_a]}{'NT'[trans_b]}"
        yield Case(what, {**operands, "out_dtype": FP32}, plans=plans, op="gemm")
        terms = {"c": integers(264, 264, limit=9).to(dtype), "bias": integers(264, limit=9).float()}
        yield Case(f"{what}, epilogue", {**operands, **terms}, plans=plans, op="gemm")
    if sm90:
        # Steps go round each ring of buffers; blocks have several tiles each, of the smallest size.
        plans = [Plan("cuda", _C.gemm_variant(i, 1, sm90)) for i in tiles]
        for what, *shape in (("many steps", 72, 72, 1096), ("many tiles", 1608, 1544, 40)):
            arguments = {**_operands(*shape, dtype, False, True), "out_dtype": FP32}
            yield Case(what, arguments, plans=plans, op="gemm")
            plans = plans[-1:]
