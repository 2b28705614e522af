"""Test calls of ops from Python, under modes, by subclasses and in compiled programs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import ops


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("mode", [Functions, Dispatched])
def test_modes_see_calls(mode: type) -> None:
    """Dispatch modes see calls of ops, also with an empty list."""
    with mode() as active:
        ops.gemm(torch.ones(2, 2), torch.ones(2, 2))
        ops.cast_([], [])
    seen = " ".join(active.seen)
    assert "amp_ext.gemm" in seen
    assert "amp_ext.cast_" in seen or mode is Dispatched  # tensors select this mode


def test_a_subclass_sees_calls_also_in_a_list() -> None:
    Named.seen.clear()
    flag = torch.zeros(1)
    ops.check_finite([torch.ones(2), torch.ones(2).as_subclass(Named)], flag)
    assert any("amp_ext.check_finite" in name for name in Named.seen)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert ops.gemm(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)


def test_arguments_by_name_position_and_default() -> None:
    a = torch.tensor([[1.0, 2.0]])
    assert ops.gemm(b=a, a=a, trans_b=True).item() == 5
    assert ops.gemm(a, a, trans_b=True, alpha=2).item() == 10  # an int for a float
    assert ops.gemm(a, a, trans_b=1, out_dtype=None).item() == 5
    product, aux = ops.gemm_with_aux(a, a, trans_b=True, activation="relu")
    assert product.item() == aux.item() == 5
    assert ops.cast_(outputs=(torch.empty(1),), inputs=[torch.ones(1)]) is None


def test_no_reference_is_left() -> None:
    grads, flag = [torch.ones(2)], torch.zeros(1)
    before = sys.getrefcount(grads[0]), sys.getrefcount(flag), sys.getrefcount(grads)
    for _ in range(3):
        ops.check_finite(grads, flag)
        with pytest.raises(RuntimeError):
            ops.check_finite(grads, torch.zeros(2))
    assert (sys.getrefcount(grads[0]), sys.getrefcount(flag), sys.getrefcount(grads)) == before


def test_torch_compile_has_them_in_its_graph() -> None:
    code = """
import torch
from amp_ext import ops
compiled = torch.compile(lambda a: ops.gemm(a, a, alpha=2.0), fullgraph=True, backend="aot_eager")
assert compiled(torch.ones(2, 2)).tolist() == [[4.0, 4.0], [4.0, 4.0]]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
