"""Run the ops in several ways: each conformance test of an op runs once per executor.

An executor is a device and the ops under the names and arguments of amp_ext.ops. The oracle is one
of them. If a test's expectation comes from torch's own op or from a literal value, the test
therefore checks the oracle as well. To add an executor, add an entry to EXECUTORS.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

import amp_ext
import reference
from amp_ext import _C
from amp_ext._triton import is_interpreted, triton_version

T = TypeVar("T")


@dataclass(frozen=True)
class Executor:
    """A way to run the ops.

    Attributes:
        name: shown in the test's id.
        device: where its tensors live.
        ops: has a function for each op.
        missing: why it cannot run here; empty when it can.
        cuda_kernels: it runs csrc/kernels.
        backend: its argument of amp_ext.set_backend.
        interpreted: a launch takes some ten milliseconds, and so do a few tensors of a list.
    """

    name: str
    device: torch.device
    ops: Any
    missing: str = ""
    cuda_kernels: bool = False
    backend: str | None = None
    interpreted: bool = False

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Make amp_ext run the ops on it; conftest.py does so for a test's executor."""
        before, mode = amp_ext.get_backend(), _C.gemm_mode()
        amp_ext.set_backend(self.backend or before)
        try:
            yield
        finally:
            amp_ext.set_backend(before)
            _C.set_gemm_mode(mode)

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
ON_CUDA = Executor("cuda", CUDA, amp_ext.ops, _missing_cuda(), cuda_kernels=True, backend="cuda")
REFERENCE = Executor("reference", CPU, reference)
EXECUTORS = (
    REFERENCE,
    Executor("cpu", CPU, amp_ext.ops),
    ON_CUDA,
    Executor(
        "triton",
        CPU if is_interpreted() else CUDA,
        amp_ext.ops,
        _missing_triton(),
        backend="triton",
        interpreted=is_interpreted(),
    ),
)


def absent() -> list[str]:
    """Return the executors that cannot run here, with the reasons."""
    return [f"{e.name} ({e.missing})" for e in EXECUTORS if e.missing]


def _parameters(executors: Sequence[Executor]) -> list[Any]:
    """Return the parameters of the executors that can run here; slow ones are for `make check`."""
    return [
        pytest.param(e, id=e.name, marks=[pytest.mark.full] if e.interpreted else [])
        for e in executors
        if not e.missing
    ]


every_executor = pytest.mark.parametrize("executor", _parameters(EXECUTORS))
"""For expectations that do not come from the oracle."""

against_oracle = pytest.mark.parametrize("executor", _parameters(EXECUTORS[1:]))
"""For comparisons with the oracle, and for what it does not promise: errors, determinism."""

native = pytest.mark.parametrize(
    "executor", _parameters([e for e in EXECUTORS if e.name in ("cpu", "cuda")])
)
"""For what takes gigabytes."""


INTERPRETED_PRODUCTS = {
    # sizes: edges of tiles, splits along k, several tiles, terms and batches
    "test_sizes": ("nn", "tt"),
    "test_one_long_side": ("(5000, 3, 5)", "(3, 5, 5000)", "(130, 1, 5000)"),
    "test_long_in_every_direction": ("",),
    "test_batches": (
        *("small-(4,)-(4,)", "small-()-(2, 3)", "large-(4,)-()", "large-()-()", "small-(0,)-()"),
    ),
    "test_sum_over_the_batch": ("small-(12,)", "large-(2, 3)", "small-(2, 0)"),
    "test_inner_dimension_of_0": ("*float16", "*bfloat16"),
    # layouts: TMA and pointers, each width of vectors, any strides
    "test_layouts_of_c": ("*-large",),
    "test_writes_nothing_but_c": ("400-*",),
    "test_overlapping_and_scattered_operands": ("*float16", "*bfloat16"),
    # numbers: sums, rounding, infinities, NaN, subnormals
    "test_dtypes": ("torch.float16-torch.float16", "torch.bfloat16-torch.bfloat16"),
    "test_error_of_long_sums": ("*",),
    "test_error_of_a_sum_over_the_batch": ("torch.float16-*",),
    "test_rounds_to_nearest_even": ("*",),
    "test_fp16_subnormals_are_kept": ("",),
    "test_infinities_and_nans_spread_as_in_ieee": ("torch.float16-torch.float16-*",),
    "test_nan_times_a_factor_of_zero": ("torch.float16-*-small",),
    "test_sums_beyond_fp16_are_rounded_once_at_the_end": ("",),
    "test_factor_beyond_fp32": ("*",),
    "test_bitwise_repeatable": ("torch.float16-*",),
    # the epilogue: c, bias, accumulation
    "test_epilogue": ("-large", "n-large", "m1-large", "3mn-small"),
    "test_c_is_not_read_when_beta_is_0": ("*",),
    "test_error": ("torch.float16-torch.float16-7",),
    "test_exact_sums": ("nn-large", "tn-large"),
    # from a layer to its gradients
    "test_exact_gradients": ("sum-tt", "all"),
    "test_equals_gemm": ("(200, 7)-torch.float16-torch.float16",),
    "test_fp32_gradients_of_16_bit_leaves": ("*",),
}
"""Patterns of the parameters, by the name of the test.

A product takes seconds in Triton's interpreter. Each case reaches code of the kernel that no other
case reaches. Autograd, layers and promotion are above the backends; the CPU's kernels test them.
"""


def is_interpreted_product(test: str, parameters: str) -> bool:
    """Return whether a test runs with parameters, as pytest's id has them without the executor."""
    return any(
        fnmatch.fnmatchcase(parameters, pattern) for pattern in INTERPRETED_PRODUCTS.get(test, ())
    )
