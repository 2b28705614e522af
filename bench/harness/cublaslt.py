"""The fastest of the algorithms that cuBLASLt's heuristics name for a product: what to beat.

It takes matrices that are stored column by column, so out = a @ b is computed as its transpose: its
first operand is b, its second is a. With beta = 1 the product is added to what `out` holds.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
COMPUTE_32F = 68
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
REDUCTION_SCHEME_COMPUTE_TYPE = 2  # parts of sums stay in FP32; no reduction, 0, is never excluded
WORKSPACE_BYTES = 64 << 20
REQUESTED = 32
RUNS, SLOW_RUNS = 10, 2
SLOW_MS = 1.0


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


@dataclass(frozen=True)
class Call:
    """A call whose arguments are made once: making them takes longer than a small product.

    Raises RuntimeError with the status where that is not 0.
    """

    name: str
    function: Callable[..., int]
    arguments: tuple[object, ...]
    alive: object = None  # what the arguments point to

    def __call__(self) -> None:
        status = self.function(*self.arguments)
        if status != 0:
            raise RuntimeError(f"{self.name} returned status {status}")


class Library:
    """cuBLASLt, a handle of it and a workspace, which its products share: they run in turn.

    Args:
        functions: the shared library.
        workspace: WORKSPACE_BYTES of a GPU's memory.
    """

    def __init__(self, functions: ctypes.CDLL, workspace: Tensor) -> None:
        self._functions = functions
        self.workspace = workspace
        self.handle = c_void_p()
        self("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *arguments: object, alive: object = None) -> Call:
        return Call(name, getattr(self._functions, name), arguments, alive)

    def __call__(self, name: str, *arguments: object) -> None:
        self.call(name, *arguments)()


@functools.cache
def library() -> Library:
    """The library that torch has loaded, one in a process; OSError or RuntimeError without."""
    major = (torch.version.cuda or "").partition(".")[0]
    functions = ctypes.CDLL(f"libcublasLt.so.{major}")
    return Library(functions, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))


Operands = tuple[Tensor, Tensor, Tensor]


class Product:
    """out = a @ b + beta * out, summed in FP32, for all operands of a kind.

    Args:
        library: cuBLASLt.
        a: [m, k], float16 or bfloat16, rows or columns contiguous.
        b: [k, n], likewise, of the same dtype.
        out: [m, n], contiguous, of that dtype or float32.
        beta: 0, and `out` is not read, or another factor.
    """

    def __init__(self, library: Library, a: Tensor, b: Tensor, out: Tensor, beta: float = 0.0):
        self._library = library
        self._kind = self._kind_of(a, b, out)
        self._alpha, self._beta = c_float(1), c_float(beta)
        self._description = c_void_p()
        library(
            "cublasLtMatmulDescCreate", byref(self._description), COMPUTE_32F, TYPES[torch.float32]
        )
        self._layouts = [c_void_p() for _ in self._kind]
        for handle, (dtype, layout), transpose in zip(
            self._layouts, self._kind, (DESC_TRANSA, DESC_TRANSB, None), strict=True
        ):
            library(
                "cublasLtMatrixLayoutCreate",
                *(byref(handle), TYPES[dtype]),
                *(c_uint64(layout.rows), c_uint64(layout.columns), c_int64(layout.leading)),
            )
            if transpose is not None:
                library(
                    "cublasLtMatmulDescSetAttribute",
                    *(self._description, transpose),
                    *(byref(c_int(layout.transposed)), c_size_t(4)),
                )

    @staticmethod
    def _kind_of(a: Tensor, b: Tensor, out: Tensor) -> list[tuple[torch.dtype, Layout]]:
        """In cuBLASLt's order."""
        return [(tensor.dtype, Layout.of_transpose(tensor)) for tensor in (b, a, out)]

    def algorithms(self) -> list[Algorithm]:
        """What the heuristics name, the most promising first."""
        preference, found = c_void_p(), c_int()
        results = (Algorithm * REQUESTED)()
        self._library("cublasLtMatmulPreferenceCreate", byref(preference))
        for attribute, value in (
            (PREF_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES)),
            (PREF_REDUCTION_SCHEME_MASK, c_uint32(REDUCTION_SCHEME_COMPUTE_TYPE)),
        ):
            self._library(
                "cublasLtMatmulPreferenceSetAttribute",
                *(preference, attribute, byref(value), c_size_t(ctypes.sizeof(value))),
            )
        b, a, out = self._layouts
        self._library(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._library.handle, self._description, b, a, out, out),
            *(preference, REQUESTED, results, byref(found)),
        )
        self._library("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.state == 0]

    def launch(self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> Call:
        """A launch by an algorithm on what is the current stream now.

        Raises:
            ValueError: shapes, dtypes or strides are not those that the product was made for.
        """
        if self._kind_of(a, b, out) != self._kind:
            raise ValueError("cublaslt: operands are not of the product's kind")
        layout_b, layout_a, layout_out = self._layouts
        pointers = [c_void_p(tensor.data_ptr()) for tensor in (b, a, out)]
        return self._library.call(
            "cublasLtMatmul",
            *(self._library.handle, self._description, byref(self._alpha)),
            *(pointers[0], layout_b, pointers[1], layout_a, byref(self._beta)),
            *(pointers[2], layout_out, pointers[2], layout_out, byref(algorithm)),
            *(c_void_p(self._library.workspace.data_ptr()), c_size_t(WORKSPACE_BYTES)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
            alive=(a, b, out),
        )

    def fastest(self, operands: Sequence[Operands]) -> Algorithm:
        """The fastest just now, of those that run; each is timed on the next operands of the turn.

        An `out` that is added to has been added to some hundred times then.

        Raises:
            RuntimeError: there is none for these matrices.
        """
        turns = itertools.cycle(operands)
        times, refused = {}, ""
        for algorithm in self.algorithms():
            launches = (self.launch(algorithm, *each) for each in turns)
            try:
                times[_milliseconds(launches)] = algorithm
            except RuntimeError as error:
                refused = f": {error}"
        if not times:
            raise RuntimeError(f"cuBLASLt has no algorithm for these matrices{refused}")
        return times[min(times)]


def _milliseconds(launches: Iterable[Callable[[], None]]) -> float:
    """Of one launch: the mean of a few where one takes long, else of some more."""
    launches = iter(launches)
    next(launches)()  # the first one loads the kernel
    once = _elapsed_ms([next(launches)])
    runs = SLOW_RUNS if once > SLOW_MS else RUNS
    return _elapsed_ms(list(itertools.islice(launches, runs))) / runs


def _elapsed_ms(launches: Sequence[Callable[[], None]]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
