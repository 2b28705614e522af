"""Tensors as the GEMM's kernels take them: batches of matrices, with their layouts in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from amp_ext.triton_kernels.gemm.plan import Problem
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LIMIT = 2**31 - 2**16
"""Of m, n, k and the number of units, which the kernels count in 32 bits."""


class Matrices(NamedTuple):
    """A batch of matrices: strides in elements, 0 where something repeats."""

    tensor: Tensor
    rows: int
    columns: int
    batch_stride: int
    row_stride: int
    column_stride: int

    def layout(self) -> int:
        """Return the LAYOUT of gemm_epilogue.py."""
        if self.column_stride == 1 or (self.columns == 1 and self.row_stride != 1):
            inner, outer, sign = self.columns, self.row_stride, 1
        elif self.row_stride == 1 or self.rows == 1:
            inner, outer, sign = self.rows, self.column_stride, -1
        else:
            return 0
        if self.tensor.data_ptr() % 16:
            return sign
        return sign * math.gcd(16 // self.tensor.element_size(), inner, outer, self.batch_stride)

    def stored(self, count: int) -> tuple[list[int], list[int]] | None:
        """Return shape and strides of `count` matrices as they are stored, rows or columns last, if
        TMA takes them: 16-byte aligned, one element beside the other, and no line over another.
        """
        lines, length, stride = self.rows, self.columns, self.row_stride
        if self.column_stride != 1:
            if self.row_stride != 1:
                return None
            lines, length, stride = self.columns, self.rows, self.column_stride
        unit = 16 // self.tensor.element_size()
        if lines == 1:
            stride = -(-length // unit) * unit
        batch_stride = self.batch_stride if count > 1 else lines * stride
        strides = [batch_stride, stride, 1]
        if self.tensor.numel() == 0 or self.tensor.data_ptr() % 16:
            return None
        if stride < length or stride % unit or batch_stride <= 0 or batch_stride % unit:
            return None
        return ([count, lines, length], strides) if max(strides) < 2**38 else None

    def descriptor(self, count: int, tile_rows: int, tile_columns: int) -> TensorDescriptor | None:
        """Return these for TMA, in tiles as `stored`."""
        stored = self.stored(count)
        if stored is None:
            return None
        tile = [tile_rows, tile_columns] if self.column_stride == 1 else [tile_columns, tile_rows]
        return TensorDescriptor(self.tensor, *stored, [1, *tile])

    def joined(self, batch: int, rows: bool) -> Matrices | None:
        """Return the batch as one matrix, above one another or (not `rows`) side by side."""
        if rows:
            if self.batch_stride != self.rows * self.row_stride:
                return None
            return self._replace(rows=batch * self.rows, batch_stride=0)
        if self.batch_stride != self.columns * self.column_stride:
            return None
        return self._replace(columns=batch * self.columns, batch_stride=0)

    def aligned(self, count: int) -> Matrices:
        """Return a copy of the `count` matrices, with lines as these have, that TMA takes."""
        strides = [self.batch_stride, self.row_stride, self.column_stride]
        matrices = self.tensor.as_strided([count, self.rows, self.columns], strides)
        if self.row_stride < self.column_stride:
            return read(_with_aligned_rows(matrices.mT), transposed=True)
        return read(_with_aligned_rows(matrices))


class Product(NamedTuple):
    """act(alpha * a @ b + beta * c + bias), or alpha * a @ b * act'(aux), and where it goes."""

    a: Matrices
    b: Matrices
    out: Matrices
    c: Matrices | None
    bias: Tensor | None
    aux: Matrices | None
    column_sums: Tensor | None
    batch: int
    terms: int
    alpha: float
    beta: float
    activation: str
    derivative: bool

    def joined(self) -> Product:
        """Return one long product instead of a sum of several, one tall one instead of a batch."""
        p = self
        if p.terms > 1:
            a, b = p.a.joined(p.terms, rows=False), p.b.joined(p.terms, rows=True)
            if a and b and a.columns <= LIMIT:
                return p._replace(a=a, b=b, terms=1)
        elif p.batch > 1 and p.b.batch_stride == 0:
            tall = [x and x.joined(p.batch, rows=True) for x in (p.a, p.out, p.c, p.aux)]
            if [x is None for x in tall] == [False, False, p.c is None, p.aux is None]:
                a, out, c, aux = tall
                if out.rows <= LIMIT:
                    return p._replace(a=a, out=out, c=c, aux=aux, batch=1)
        return p

    def count(self, operand: Matrices) -> int:
        """Return how many matrices of an operand there are in memory."""
        return max(self.batch, self.terms) if operand.batch_stride else 1

    def problem(self, has_tma: bool) -> Problem:
        vectors = [
            8 if has_tma and x.stored(self.count(x)) else max(1, abs(x.layout()))
            for x in (self.a, self.b)
        ]
        written = [x for x in (self.out, self.c, self.aux) if x]
        return Problem(
            m=self.out.rows,
            n=self.out.columns,
            k=self.a.columns,
            batch=self.batch,
            terms=self.terms,
            element_bytes=sum(x.tensor.element_size() for x in written),
            vector=min(vectors),
        )


def read(tensor: Tensor, transposed: bool = False) -> Matrices:
    """Return the last two dimensions as matrices, the others as a batch: of a copy where these have
    no common stride.
    """
    batch_stride, next_stride = None, 0
    for d in range(tensor.dim() - 3, -1, -1):
        if tensor.size(d) == 1:
            continue
        if batch_stride is None:
            batch_stride = tensor.stride(d)
        elif tensor.stride(d) != next_stride:
            tensor = _with_aligned_rows(tensor)
            batch_stride = tensor.size(-2) * tensor.stride(-2)
            break
        next_stride = tensor.stride(d) * tensor.size(d)
    rows, columns = tensor.size(-2), tensor.size(-1)
    row_stride, column_stride = tensor.stride(-2), tensor.stride(-1)
    batch_stride = batch_stride or 0
    # Strides of one row or column mean nothing; these let it join those of other matrices.
    if rows == 1:
        row_stride = batch_stride
    elif columns == 1:
        column_stride = batch_stride
    if transposed:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    return Matrices(tensor, rows, columns, batch_stride, row_stride, column_stride)


def _with_aligned_rows(tensor: Tensor) -> Tensor:
    unit = 16 // tensor.element_size()
    *outer, size = tensor.shape
    return tensor.new_empty(*outer, -(-size // unit) * unit)[..., :size].copy_(tensor)
