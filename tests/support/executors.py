"""What can run the ops: each conformance test of an op is run once per executor.

An executor is a device and the ops under the names and arguments of amp_ext.ops. The oracle is one
of them, so that a test whose expectation does not come from it (but from torch's own op, or from a
literal value) checks the oracle as well. To add an executor, add an entry to EXECUTORS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch

import amp_ext
import simt_ops
from amp_ext import reference
from amp_ext._triton import is_interpreted, triton_version
from simt import build

T = TypeVar("T")


@dataclass(frozen=True)
class Executor:
    """One way to run the ops.

    Attributes:
        name: shown in the test's id.
        device: where its tensors live.
        ops: has a function for each op.
        missing: why it cannot run here; empty when it can.
        cuda_kernels: it runs csrc/kernels.
        backend: what amp_ext.set_backend is to choose for it; conftest.py does.
        interpreted: a launch takes some ten milliseconds, and so do a few tensors of a list.
    """

    name: str
    device: torch.device
    ops: Any
    missing: str = ""
    cuda_kernels: bool = False
    backend: str | None = None
    interpreted: bool = False

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a 0-dim tensor on the device."""
        return torch.tensor(value, dtype=dtype, device=self.device)

    def some(self, values: Sequence[T], most: int = 5) -> list[T]:
        """Return the values; where interpreted a few, the first and the last among them."""
        count = len(values)
        if not self.interpreted or count <= most:
            return list(values)
        return [values[i * (count - 1) // (most - 1)] for i in range(most)]

    def length(self, count: int) -> int:
        """Return how long a list of `count` tensors is to be."""
        return min(count, 60) if self.interpreted else count


def _missing_cuda() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not amp_ext._C.cuda_built():
        return "amp_ext was built without its CUDA kernels"
    return ""


def _missing_triton() -> str:
    if triton_version() is None:
        return "Triton is not installed"
    if not torch.cuda.is_available() and not is_interpreted():
        return "torch sees no CUDA device, and TRITON_INTERPRET is not set"
    return ""


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE = Executor("reference", CPU, reference)
EXECUTORS = (
    REFERENCE,
    Executor("cpu", CPU, amp_ext.ops),
    Executor("cuda", CUDA, amp_ext.ops, _missing_cuda(), cuda_kernels=True, backend="cuda"),
    Executor(
        "triton",
        CPU if is_interpreted() else CUDA,
        amp_ext.ops,
        _missing_triton(),
        backend="triton",
        interpreted=is_interpreted(),
    ),
)
SIMT = Executor("simt", CPU, simt_ops.Ops(), build.missing(), cuda_kernels=True)
SIMT_SM90 = replace(SIMT, name="simt_sm90", ops=simt_ops.Ops(sm90=True))
KERNEL_EXECUTORS = (*EXECUTORS, SIMT)
GEMM_EXECUTORS = (*KERNEL_EXECUTORS, SIMT_SM90)


def _parameters(executors: Sequence[Executor]) -> list[Any]:
    return [
        pytest.param(
            executor,
            id=executor.name,
            marks=pytest.mark.skipif(bool(executor.missing), reason=executor.missing),
        )
        for executor in executors
    ]


every_executor = pytest.mark.parametrize("executor", _parameters(EXECUTORS))
"""For expectations that do not come from the oracle."""

against_oracle = pytest.mark.parametrize("executor", _parameters(EXECUTORS[1:]))
"""For comparisons with the oracle, and for what it does not promise: errors, determinism."""

every_kernel_executor = pytest.mark.parametrize("executor", _parameters(KERNEL_EXECUTORS))
"""As every_executor, for ops whose CUDA kernels tests/simt runs on the CPU too."""

kernels_against_oracle = pytest.mark.parametrize("executor", _parameters(KERNEL_EXECUTORS[1:]))
"""As against_oracle, likewise."""

every_gemm_executor = pytest.mark.parametrize("executor", _parameters(GEMM_EXECUTORS))
"""As every_kernel_executor, for products, which have two CUDA kernels."""

gemm_against_oracle = pytest.mark.parametrize("executor", _parameters(GEMM_EXECUTORS[1:]))
"""As kernels_against_oracle, likewise."""
