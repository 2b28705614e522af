"""Test the example as on a machine with a GPU, without any reference to cudasim.

nvcc -O3 -shared -Xcompiler -fPIC -cudart shared -o libexample.so transpose.cu
python -m cudasim --sources transpose.cu --capability 80 -- pytest
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

LIBRARY = Path(os.environ.get("EXAMPLE", Path(__file__).parent / "libexample.so"))

pytestmark = pytest.mark.skipif(
    not (LIBRARY.exists() and torch.cuda.is_available()),
    reason="for a GPU, or python -m cudasim; nvcc makes libexample.so",
)


def call(name: str, a: torch.Tensor, out: torch.Tensor, *more: object) -> None:
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (a, out))
    assert getattr(ctypes.CDLL(str(LIBRARY)), f"example_{name}")(*pointers, *more) == 0


@pytest.mark.parametrize("n", [1, 32, 70])
def test_transpose(n: int) -> None:
    a = torch.randn(n, n).cuda()
    out = torch.empty_like(a)
    call("transpose", a, out, n, ctypes.c_bool(False))
    assert torch.equal(out.cpu(), a.cpu().t())


def test_transpose_in_haste() -> None:
    """A barrier is missing; a GPU seldom shows it."""
    a = torch.randn(70, 70).cuda()
    out = torch.empty_like(a)
    call("transpose", a, out, 70, ctypes.c_bool(True))
    assert torch.equal(out.cpu(), a.cpu().t())


def test_sum() -> None:
    a, out = torch.arange(1000.0).cuda(), torch.zeros(()).cuda()
    call("sum", a, out, 1000)
    assert out.item() == 499_500
