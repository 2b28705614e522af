"""gemm: the launch of a product, from its plan."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from amp_ext.triton_kernels.gemm.kernel import Form, Kind, constant, gemm_kernel
from amp_ext.triton_kernels.gemm.plan import Device, Tile, plans
from amp_ext.triton_kernels.launch import INTERPRETED_MULTIPROCESSORS, launch, multiprocessors
from amp_ext.triton_kernels.numerics import INTERPRETED

DTYPES = (tl.float32, tl.float16, tl.bfloat16, tl.float64)
"""The dtypes in the order of csrc/include/amp_ext/dtype.h."""


class Matrix(NamedTuple):
    """Matrices in memory. Strides are in elements."""

    dtype: Any
    count: int
    """1 where all are the same."""
    rows: int
    columns: int
    batch_stride: int
    """0 where there is one."""
    row_stride: int
    column_stride: int
    is_aligned: bool
    """Whether the address is a multiple of 16."""

    @property
    def layout(self) -> int:
        """The layout of kernel.py."""
        if self.column_stride == 1 or (self.columns == 1 and self.row_stride != 1):
            inner, outer, sign = self.columns, self.row_stride, 1
        elif self.row_stride == 1 or self.rows == 1:
            inner, outer, sign = self.rows, self.column_stride, -1
        else:
            return 0
        if not self.is_aligned:
            return sign
        vector = 128 // self.dtype.primitive_bitwidth
        return sign * math.gcd(vector, inner, outer, self.batch_stride)

    def tensor_map(self, rows: int, columns: int) -> TensorMap | None:
        """Return the map for tiles of rows x columns, or None where TMA cannot load them.

        TMA loads contiguous lines at multiples of 16 bytes that do not overlap.
        """
        shape, stride, tile = [self.rows, self.columns], self.row_stride, [rows, columns]
        if self.column_stride != 1:
            shape, stride, tile = shape[::-1], self.column_stride, tile[::-1]
        lines, length = shape
        unit = 128 // self.dtype.primitive_bitwidth
        if lines == 1:
            stride = -(-length // unit) * unit
        batch_stride = self.batch_stride if self.count > 1 else lines * stride
        strides = [batch_stride, stride]
        is_contiguous = 1 in (self.row_stride, self.column_stride) and stride >= length
        fits = all(0 < x < 2**38 and x % unit == 0 for x in strides)
        if not (is_contiguous and fits and self.is_aligned and self.count * lines * length):
            return None
        dtype = torch.float16 if self.dtype == tl.float16 else torch.bfloat16
        return TensorMap(dtype, [self.count, *shape], [*strides, 1], [1, *tile])


class TensorMap(NamedTuple):
    """A TensorDescriptor without its address."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    def at(self, address: int) -> TensorDescriptor:
        base: Any = SimpleNamespace(data_ptr=lambda: address, dtype=self.dtype)
        if INTERPRETED.value:
            memory = (ctypes.c_char * 16).from_address(address)
            base = torch.frombuffer(memory, dtype=self.dtype)
        return TensorDescriptor(base, *self[1:])


class Product:
    """The launch of a product, for all addresses of the same alignment.

    Attributes:
        scratch_bytes: the size of its scratch memory.
        tickets: the number of its counters, which are 0 before and after.
        compiled: the kernel; None before the first launch.
    """

    def __init__(
        self,
        device: int,
        programs: int,
        tile: Tile,
        maps: tuple[TensorMap | None, TensorMap | None],
        numbers: tuple[int, ...],
        form: Form,
    ) -> None:
        batch, _, m, n, _, splits, *_ = numbers
        tiles = batch * math.ceil(m / tile.m) * math.ceil(n / tile.n) if splits > 1 else 0
        self.scratch_bytes = 4 * tile.m * tile.n * tiles * splits
        self.tickets = tiles
        self.programs, self.maps, self.form = programs, maps, form
        self.options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self._device, self._constant = device, (*numbers, form)
        self.compiled: Any = None

    def __call__(self, *values: float) -> None:
        """Launch the product with the kernel's parameters from scratch to beta."""
        a_map, b_map = self.maps
        maps = (a_map and a_map.at(values[3]), b_map and b_map.at(values[4]))
        arguments = (*values, *maps, *self._constant)
        if self.compiled is None:
            self.compiled = gemm_kernel[(self.programs,)](*arguments, **self.options)
        else:
            stream = driver.active.get_current_stream(self._device)
            launch(self.compiled, self.programs, stream, arguments)


@functools.lru_cache(4096)
def gemm(index: int, *arguments: Any) -> Product:
    """Return the launch of a product on a device; `product` describes the other arguments."""
    if INTERPRETED.value:
        device = Device(0, INTERPRETED_MULTIPROCESSORS)
    else:
        major, minor = torch.cuda.get_device_capability(index)
        device = Device(10 * major + minor, multiprocessors(index))
    return product(device, index, *arguments)


def product(
    device: Device,
    index: int,
    variant: int,
    sizes: tuple[int, int, int, int, int],
    bias: int | None,
    *matrices: tuple[Any, ...] | None,
) -> Product:
    """Return the launch of out = alpha * a @ b + beta * c + bias.

    Args:
        variant: the number of the plan; 0 is the preferred one.
        sizes: batch, terms, m, n, k. Each result sums `terms` products; batch or terms is 1.
        bias: the number of its dtype, or None.
        matrices: out, a, b, c: the number of the dtype, three strides, and whether the address is a
            multiple of 16; c may be None. The column stride of out is 1.
    """
    batch, terms, m, n, k = sizes
    result, left, right = (batch, m, n), (batch * terms, m, k), (batch * terms, k, n)
    shapes = (result, left, right, result)
    out, a, b, c = (x and _matrix(x, *at) for x, at in zip(matrices, shapes, strict=True))
    vectors = [8 if device.has_tma and x.tensor_map(1, 1) else abs(x.layout) for x in (a, b)]
    found = plans(device, min(vectors), *sizes)
    tile, splits, units = found[variant if variant < len(found) else 0]
    maps = (None, None)
    if device.has_tma:
        maps = (a.tensor_map(tile.m, tile.k), b.tensor_map(tile.k, tile.n))
    parts = tile.parts(min(abs(x.layout) for x in (out, c) if x))
    values = (tile.m, tile.n, tile.k, parts, splits > 1)
    kinds = (x and Kind(constant(x.dtype), constant(x.layout)) for x in (out, a, b, c))
    form = Form(*map(constant, (*values, None if bias is None else DTYPES[bias], *kinds)))
    strides = [*(x[4:7] if x else (0, 0, 0) for x in (a, b, c)), out[4:6]]
    numbers = (*sizes, splits, *itertools.chain(*strides))
    programs = min(units, device.multiprocessors * tile.programs)
    return Product(index, programs, tile, maps, numbers, form)


def _matrix(given: tuple[Any, ...], count: int, rows: int, columns: int) -> Matrix:
    dtype, batch_stride, row_stride, column_stride, is_aligned = given
    if count == 1 or batch_stride == 0:
        count, batch_stride = min(count, 1), 0
    strides = (batch_stride, row_stride, column_stride)
    return Matrix(DTYPES[dtype], count, rows, columns, *strides, is_aligned)
