"""The fastest of the algorithms that cuBLASLt's heuristics name for a product: what to beat.

It takes matrices that are stored column by column, so out = a @ b is computed as its transpose: its
first operand is b, its second is a. With beta = 1 the product is added to what `out` holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
COMPUTE_32F = 68
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES = 1
WORKSPACE_BYTES = 64 << 20
REQUESTED = 32
RUNS = 10


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Layout(NamedTuple):
    """A matrix as it is stored, column by column, and whether the product needs its transpose."""

    rows: int
    columns: int
    leading: int
    transposed: bool

    @classmethod
    def of_transpose(cls, matrix: Tensor) -> Layout:
        """The transpose of a matrix, which is stored row by row or column by column."""
        rows, columns = matrix.shape
        if matrix.stride(1) == 1:
            return cls(columns, rows, matrix.stride(0), False)
        if matrix.stride(0) == 1:
            return cls(rows, columns, matrix.stride(1), True)
        raise ValueError(f"cublaslt: a matrix of strides {matrix.stride()} has no unit stride")


class Library:
    """The library that torch has loaded, and a handle of it with a workspace; OSError where there
    is none."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self._functions = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.handle = c_void_p()
        self("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, name: str, *arguments: object) -> None:
        """Call a function; raise RuntimeError with the status where it is not 0."""
        status = getattr(self._functions, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned status {status}")


class Product:
    """out = a @ b + beta * out, summed in FP32, by one of several algorithms.

    Args:
        library: cuBLASLt; its products run one after the other, for they share its workspace.
        a: [m, k], float16 or bfloat16, rows or columns contiguous.
        b: [k, n], likewise, of the same dtype.
        out: [m, n], contiguous, of that dtype or float32.
        beta: 0, and `out` is not read, or another factor.
    """

    def __init__(
        self, library: Library, a: Tensor, b: Tensor, out: Tensor, beta: float = 0.0
    ) -> None:
        self._library = library
        self._beta = c_float(beta)
        self._tensors = b, a, out
        self._description = c_void_p()
        library(
            "cublasLtMatmulDescCreate", byref(self._description), COMPUTE_32F, TYPES[torch.float32]
        )
        self._layouts = [c_void_p() for _ in self._tensors]
        for handle, tensor, transpose in zip(
            self._layouts, self._tensors, (DESC_TRANSA, DESC_TRANSB, None), strict=True
        ):
            layout = Layout.of_transpose(tensor)
            library(
                "cublasLtMatrixLayoutCreate",
                *(byref(handle), TYPES[tensor.dtype]),
                *(c_uint64(layout.rows), c_uint64(layout.columns), c_int64(layout.leading)),
            )
            if transpose is not None:
                library(
                    "cublasLtMatmulDescSetAttribute",
                    *(self._description, transpose),
                    *(byref(c_int(layout.transposed)), c_size_t(4)),
                )

    def algorithms(self) -> list[Algorithm]:
        """What the heuristics name, the most promising first."""
        preference, found = c_void_p(), c_int()
        results = (Algorithm * REQUESTED)()
        self._library("cublasLtMatmulPreferenceCreate", byref(preference))
        self._library(
            "cublasLtMatmulPreferenceSetAttribute",
            *(preference, PREF_MAX_WORKSPACE_BYTES),
            *(byref(c_size_t(WORKSPACE_BYTES)), c_size_t(8)),
        )
        b, a, out = self._layouts
        self._library(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._library.handle, self._description, b, a, out, out),
            *(preference, REQUESTED, results, byref(found)),
        )
        self._library("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.state == 0]

    def run(self, algorithm: Algorithm) -> None:
        """Launch on the current stream."""
        b, a, out = (
            (c_void_p(tensor.data_ptr()), layout)
            for tensor, layout in zip(self._tensors, self._layouts, strict=True)
        )
        self._library(
            "cublasLtMatmul",
            *(self._library.handle, self._description, byref(c_float(1)), *b, *a),
            *(byref(self._beta), *out, *out, byref(algorithm)),
            *(c_void_p(self._library.workspace.data_ptr()), c_size_t(WORKSPACE_BYTES)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )


def fastest(
    operands: Sequence[tuple[Tensor, Tensor, Tensor]], beta: float = 0.0
) -> list[Callable[[], None]]:
    """A launch for each (a, b, out), by the algorithm that has just been the fastest on the first.

    Args:
        operands: as for Product; all of the same shapes, dtypes and strides.
        beta: as for Product. The first `out` has been added to some hundred times then.

    Raises:
        RuntimeError: there is none for these matrices.
    """
    library = Library()
    products = [Product(library, *tensors, beta) for tensors in operands]
    times = {}
    for algorithm in products[0].algorithms():
        launch = partial(products[0].run, algorithm)
        launch()
        times[_milliseconds(launch)] = algorithm
    if not times:
        raise RuntimeError("cuBLASLt has no algorithm for these matrices")
    return [partial(product.run, times[min(times)]) for product in products]


def _milliseconds(launch: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(RUNS):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
