"""What a plan depends on: sizes, memory layouts and dtypes of a product's tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from amp_ext.triton_kernels.gemm.plan import Problem
from torch import Tensor


class Matrices(NamedTuple):
    """Matrices that lie `batch_stride` apart in memory: strides in elements."""

    dtype: torch.dtype
    count: int
    """1 where all are the same."""
    rows: int
    columns: int
    batch_stride: int
    """0 where there is one."""
    row_stride: int
    column_stride: int
    is_aligned: bool
    """Whether the first one begins at a multiple of 16 bytes."""

    def layout(self) -> int:
        """Return the LAYOUT of epilogue.py."""
        if self.column_stride == 1 or (self.columns == 1 and self.row_stride != 1):
            inner, outer, sign = self.columns, self.row_stride, 1
        elif self.row_stride == 1 or self.rows == 1:
            inner, outer, sign = self.rows, self.column_stride, -1
        else:
            return 0
        if not self.is_aligned:
            return sign
        return sign * math.gcd(16 // self.dtype.itemsize, inner, outer, self.batch_stride)

    def stored(self) -> tuple[list[int], list[int]] | None:
        """Return shape and strides as they are stored, the contiguous dimension last, if TMA takes
        them: 16-byte aligned, and no line over another.
        """
        lines, length, stride = self.rows, self.columns, self.row_stride
        if self.column_stride != 1:
            if self.row_stride != 1:
                return None
            lines, length, stride = self.columns, self.rows, self.column_stride
        unit = 16 // self.dtype.itemsize
        if lines == 1:
            stride = -(-length // unit) * unit
        batch_stride = self.batch_stride if self.count > 1 else lines * stride
        if self.count * lines * length == 0 or not self.is_aligned:
            return None
        if stride < length or stride % unit or batch_stride <= 0 or batch_stride % unit:
            return None
        if max(batch_stride, stride) >= 2**38:
            return None
        return [self.count, lines, length], [batch_stride, stride, 1]


def matrices(tensor: Tensor) -> Matrices:
    """Describe a tensor [count, rows, columns]."""
    count, rows, columns = tensor.shape
    batch_stride, row_stride, column_stride = tensor.stride()
    if count == 1 or batch_stride == 0:
        count, batch_stride = min(count, 1), 0
    aligned = tensor.data_ptr() % 16 == 0
    return Matrices(
        tensor.dtype, count, rows, columns, batch_stride, row_stride, column_stride, aligned
    )


class Product(NamedTuple):
    """act(alpha * a @ b + beta * c + bias), or alpha * a @ b * act'(aux)."""

    out: Matrices
    a: Matrices
    b: Matrices
    c: Matrices | None
    aux: Matrices | None
    bias: torch.dtype | None
    has_column_sums: bool
    batch: int
    terms: int
    """Products that are summed in each matrix of the result."""
    activation: str
    derivative: bool

    def problem(self, has_tma: bool) -> Problem:
        written = [x for x in (self.out, self.c, self.aux) if x]
        vectors = [
            8 if has_tma and x.stored() else max(1, abs(x.layout())) for x in (self.a, self.b)
        ]
        return Problem(
            m=self.out.rows,
            n=self.out.columns,
            k=self.a.columns,
            batch=self.batch,
            terms=self.terms,
            element_bytes=sum(x.dtype.itemsize for x in written),
            vector=min(vectors),
        )
