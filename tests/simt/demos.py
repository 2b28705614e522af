"""The kernels of tests/simt/kernels on torch tensors: executed on the CPU, or run by a GPU.

The environment variables AMP_EXT_SIMT and AMP_EXT_SIMT_LIBRARY mean what they do in simt_ops.py.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from simt import build
from simt.library import Library, Schedule

ARCHES = {"block_sum": "80", "gemm_sm80": "80", "gemm_sm90": "90a"}
"""The architecture that each kernel is written for."""
SOURCES = {name: build.HERE / "kernels" / f"{name}.cu" for name in ARCHES}

INVALID_VALUE = 1  # cudaErrorInvalidValue
INVALID_CONFIGURATION = 9


class LaunchError(RuntimeError):
    """A launcher returned an error of the CUDA runtime."""

    def __init__(self, kernel: str, error: int, report: str) -> None:
        super().__init__(f"demo_{kernel} returned CUDA error {error}. {report}")
        self.error = error


class Simt:
    """Executes the kernels on tensors of the CPU."""

    name = "simt"
    device = torch.device("cpu")

    def missing(self, kernel: str) -> str:
        """Return why a kernel cannot run here; empty when it can."""
        return build.missing()

    def call(self, kernel: str, schedule: Schedule, *arguments: Tensor | int) -> None:
        """Launch a kernel; raise LaunchError where its launcher refuses or the executor fails."""
        library = self._library()
        error = library.call(f"demo_{kernel}", schedule, *map(_to_c, arguments))
        if error:
            raise LaunchError(kernel, error, library.report())

    @staticmethod
    @cache
    def _library() -> Library:
        built = os.environ.get("AMP_EXT_SIMT_LIBRARY")
        variant = os.environ.get("AMP_EXT_SIMT", "plain")
        return Library(built or build.build(variant, "demos", list(SOURCES.values())))


class Cuda:
    """Runs the kernels on torch's GPU, which has its own schedule."""

    name = "cuda"
    device = torch.device("cuda")

    def missing(self, kernel: str) -> str:
        """Return why a kernel cannot run here; empty when it can."""
        from simt import nvcc

        return nvcc.missing(ARCHES[kernel])

    def call(self, kernel: str, schedule: Schedule, *arguments: Tensor | int) -> None:
        """Launch a kernel and wait for it."""
        torch.cuda.synchronize()  # the tensors' own stream may still be writing them
        error = getattr(self._library(ARCHES[kernel]), f"demo_{kernel}")(*map(_to_c, arguments))
        if error:
            raise LaunchError(kernel, error, "")
        torch.cuda.synchronize()

    @staticmethod
    @cache
    def _library(arch: str) -> ctypes.CDLL:
        from simt import nvcc

        return ctypes.CDLL(str(nvcc.build("demos", sources(arch), arch)))


Executor = Simt | Cuda
SIMT, CUDA = Simt(), Cuda()


def sources(arch: str) -> list[Path]:
    """Return the files that can be compiled for an architecture."""
    return [path for name, path in SOURCES.items() if ARCHES[name] in ("80", arch)]


def block_sum(executor: Executor, x: Tensor, sums: Tensor, schedule: Schedule) -> None:
    """sums[i] = the sum of row i of x."""
    executor.call("block_sum", schedule, x, sums, *x.shape)


def gemm_sm80(executor: Executor, a: Tensor, b: Tensor, c: Tensor, schedule: Schedule) -> None:
    """c = a @ b^T."""
    bf16 = a.dtype == torch.bfloat16
    executor.call("gemm_sm80", schedule, a, b, c, *c.shape, a.shape[1], bf16)


def gemm_sm90(
    executor: Executor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    schedule: Schedule,
    cluster: int = 1,
    blocks: int = 2,
) -> None:
    """c[i] = a[i] @ b[i]; a and b in memory as they are or with their last two indices swapped."""
    batch, m, k = a.shape
    a_is_mn_major = a.stride(2) != 1
    b_is_mn_major = b.stride(2) == 1
    layouts = (a_is_mn_major, b_is_mn_major, a.dtype == torch.bfloat16)
    executor.call(
        "gemm_sm90", schedule, a, b, c, m, c.shape[2], k, batch, *layouts, cluster, blocks
    )


def _to_c(argument: Tensor | int) -> c_void_p | c_int:
    return c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else c_int(argument)
