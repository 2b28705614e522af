"""Find the fastest algorithm of cuBLASLt's heuristics for a product.

cuBLASLt takes matrices that are stored column by column, so out = a @ b is computed as its
transpose: the first operand is b, the second is a. With beta = 1 the product is added to `out`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
COMPUTE_32F = 68
TRANSPOSE_A, TRANSPOSE_B = 3, 4
MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK = 1, 3
COMPUTE_TYPE = 2  # parts of sums stay in FP32; no reduction, 0, is never excluded
WORKSPACE_BYTES = 64 << 20
REQUESTED = 32
RUNS = 10
Operands = tuple[Tensor, Tensor, Tensor]  # a, b and out
Layout = tuple[torch.dtype, int, int, int, bool]  # rows, columns, leading dimension, transposed


class Algorithm(ctypes.Structure):
    """Mirror cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Library:
    """Call cuBLASLt with a handle and a workspace that all products share in turn."""

    def __init__(self, functions: ctypes.CDLL, workspace: Tensor) -> None:
        self.functions, self.workspace = functions, workspace
        self.handle = c_void_p()
        self("cublasLtCreate", byref(self.handle))

    def __call__(self, name: str, *arguments: object) -> None:
        if status := getattr(self.functions, name)(*arguments):
            raise RuntimeError(f"{name} returned status {status}")


@functools.cache
def library() -> Library:
    """Return the library that torch has loaded, or raise OSError or RuntimeError."""
    major = (torch.version.cuda or "").partition(".")[0]
    functions = ctypes.CDLL(f"libcublasLt.so.{major}")
    return Library(functions, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))


def layout(matrix: Tensor) -> Layout:
    """Return the layout of the transpose of a matrix, stored by rows or by columns."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1:
        return matrix.dtype, columns, rows, matrix.stride(0), False
    if matrix.stride(0) == 1:
        return matrix.dtype, rows, columns, matrix.stride(1), True
    raise ValueError(f"cublaslt: expected a unit stride, got {matrix.stride()}")


class Product:
    """Compute out = a @ b + beta * out, summed in FP32, for all operands of one kind.

    Args:
        library: cuBLASLt.
        operands: a [m, k] and b [k, n] of float16 or bfloat16, out [m, n] of that or float32.
        beta: 0, and `out` is not read, or another factor.
    """

    def __init__(self, library: Library, operands: Operands, beta: float = 0.0) -> None:
        self.library, self.alpha, self.beta = library, c_float(1), c_float(beta)
        a, b, out = operands
        kinds = [layout(matrix) for matrix in (b, a, out)]
        self.description, self.layouts = c_void_p(), [c_void_p() for _ in kinds]
        fp32 = TYPES[torch.float32]
        library("cublasLtMatmulDescCreate", byref(self.description), COMPUTE_32F, fp32)
        for handle, (dtype, rows, columns, leading, _) in zip(self.layouts, kinds, strict=True):
            sizes = c_uint64(rows), c_uint64(columns), c_int64(leading)
            library("cublasLtMatrixLayoutCreate", byref(handle), TYPES[dtype], *sizes)
        for attribute, (*_, transposed) in zip((TRANSPOSE_A, TRANSPOSE_B), kinds, strict=False):
            value = byref(c_int(transposed)), c_size_t(4)
            library("cublasLtMatmulDescSetAttribute", self.description, attribute, *value)

    def algorithms(self) -> list[Algorithm]:
        """Return the algorithms that the heuristics name, the most promising first."""
        preference, found, results = c_void_p(), c_int(), (Algorithm * REQUESTED)()
        self.library("cublasLtMatmulPreferenceCreate", byref(preference))
        for attribute, value in (
            (MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES)),
            (REDUCTION_SCHEME_MASK, c_uint32(COMPUTE_TYPE)),
        ):
            pair = byref(value), c_size_t(ctypes.sizeof(value))
            self.library("cublasLtMatmulPreferenceSetAttribute", preference, attribute, *pair)
        b, a, out = self.layouts
        self.library(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self.library.handle, self.description, b, a, out, out),
            *(preference, REQUESTED, results, byref(found)),
        )
        self.library("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.state == 0]

    def launch(self, algorithm: Algorithm, operands: Operands) -> Callable[[], None]:
        """Return a launch on the current stream; its arguments are made once.

        Args:
            algorithm: one of `algorithms`.
            operands: of the product's shapes, dtypes and strides.
        """
        a, b, out = (c_void_p(tensor.data_ptr()) for tensor in operands)
        of_b, of_a, of_out = self.layouts
        call = functools.partial(
            self.library,
            "cublasLtMatmul",
            *(self.library.handle, self.description, byref(self.alpha)),
            *(b, of_b, a, of_a, byref(self.beta), out, of_out, out, of_out, byref(algorithm)),
            *(c_void_p(self.library.workspace.data_ptr()), c_size_t(WORKSPACE_BYTES)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return lambda alive=operands: call()

    def fastest(self, operands: Sequence[Operands]) -> Algorithm:
        """Return the fastest algorithm that runs, timed on the operands in turn.

        An `out` that is added to has been added to some hundred times then.

        Raises:
            RuntimeError: there is no algorithm for these matrices.
        """
        turns = itertools.cycle(operands)
        times, refused = {}, ""
        for algorithm in self.algorithms():
            launches = [self.launch(algorithm, next(turns)) for _ in range(RUNS)]
            try:
                launches[0]()  # loads the kernel
                times[_elapsed_ms(launches)] = algorithm
            except RuntimeError as error:
                refused = f": {error}"
        if not times:
            raise RuntimeError(f"cuBLASLt has no algorithm for these matrices{refused}")
        return times[min(times)]


def _elapsed_ms(launches: Sequence[Callable[[], None]]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
