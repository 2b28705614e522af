"""Test that every op in torch's autocast registry has torch's result dtypes and errors.

Ops without routing also have torch's values, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map

import amp_ext
from autocast_samples import SAMPLES, Arguments, check_samples
from cases import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of ops that it deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def registered(key: str) -> list[str]:
    """The ops that torch registers for a dispatch key, without their "aten::"."""
    ops = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return sorted(op.removeprefix("aten::") for op in ops if op.startswith("aten::"))


ON_CPU = registered("AutocastCPU")
SAMPLED = [name for name in ON_CPU if name in SAMPLES]
ROUTED = ("addmm", "baddbmm", "bmm", "conv2d", "conv2d.padding", "linear", "matmul", "mm")
LOW = (torch.float16, torch.bfloat16)


def overload(name: str) -> Callable[..., Any]:
    base, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), suffix or "default")


def first_low(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Only the first of the floating-point tensors in `dtype`."""
    leaves = tree_leaves(arguments)
    first = next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
    return tree_map(lambda x: x.to(dtype) if x is first else x, arguments)


def all_low(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return tree_map(cast, arguments)


OPERANDS: dict[str, Callable[[Arguments, torch.dtype], Arguments]] = {
    "fp32": lambda arguments, dtype: arguments,
    "first low": first_low,
    "low": all_low,
    "fp64": lambda arguments, dtype: all_low(arguments, torch.float64),
}


def outcome(region: Any, op: Callable[..., Any], arguments: Arguments, dtype: torch.dtype) -> Any:
    """The result, or the error."""
    args, kwargs = arguments
    try:
        with region("cpu", dtype=dtype):
            return op(*args, **kwargs)
    except Exception as error:  # torch defines the expected error
        return type(error), str(error)


def plain(tensor: Tensor) -> Tensor:
    """Real, and without names (torch before 2.13 has them)."""
    tensor = tensor.rename(None) if hasattr(tensor, "rename") else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def test_every_registered_op_has_a_sample() -> None:
    """The samples cover every op in torch's registry."""
    check_samples(ON_CPU, torch.__version__)
    assert set(ROUTED) <= set(ON_CPU)


def test_an_op_without_a_sample_is_named() -> None:
    """An op without a sample is an error, or a warning if torch is newer."""
    with pytest.raises(AssertionError, match="not tested: aged, new"):
        check_samples(["mm", "new", "aged"], "2.14.1+cu130")
    with pytest.warns(RuntimeWarning, match="not tested: new"):
        check_samples(["mm", "new"], "2.15.0.dev20270101")


@pytest.mark.parametrize("name", SAMPLED)
def test_is_as_under_torch(name: str) -> None:
    """Each op has torch's results and errors for operands of every kind."""
    args, kwargs = SAMPLES[name]()
    # Before 2.13 torch passes no named tensors through torch.ops.
    if "imname" not in name or TorchVersion(torch.__version__) >= (2, 13):
        overload(name)(*args, **kwargs)
    for dtype, operands in itertools.product(LOW, OPERANDS):
        compare(name, dtype, operands)


def compare(name: str, dtype: torch.dtype, operands: str) -> None:
    """Run an op in amp_ext's region and in torch's."""
    arguments = OPERANDS[operands](SAMPLES[name](), dtype)
    ours, theirs = (
        outcome(region, overload(name), arguments, dtype)
        for region in (amp_ext.autocast, torch.autocast)
    )
    results, expected = tree_leaves(ours), tree_leaves(theirs)
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        if not isinstance(other, Tensor):
            assert one == other
        elif name in ROUTED and operands != "fp64":
            assert (one.dtype, one.shape, one.stride()) == (
                other.dtype,
                other.shape,
                other.stride(),
            )
        else:
            assert one.dtype == other.dtype
            assert_same(plain(one), plain(other))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_python_operators_give_the_lower_precision(dtype: torch.dtype) -> None:
    """The operator ``@`` and its methods give the region's dtype."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with amp_ext.autocast("cpu", dtype=dtype):
        assert (a @ b).dtype == a.__matmul__(b).dtype == b.__rmatmul__(a).dtype == dtype
