"""bench/cublaslt.py: matrices as cuBLASLt is told of them, and the fastest algorithm is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import integers, stored

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import cublaslt
from cublaslt import Layout

TRANSPOSES = [(a, b) for a in (False, True) for b in (False, True)]
every_transpose = pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def operands(trans: tuple[bool, bool], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return a [24, 40] and b [40, 16], stored as their transposes where `trans` says so."""
    shapes, where = ((24, 40), (40, 16)), torch.device(device)
    made = [stored(integers(s, dtype, where), t) for s, t in zip(shapes, trans, strict=True)]
    return tuple(x.mT if t else x for x, t in zip(made, trans, strict=True))


def as_cublaslt_reads(matrix: Tensor, layout: Layout) -> Tensor:
    columns = matrix.as_strided((layout.rows, layout.columns), (1, layout.leading))
    return columns.mT if layout.transposed else columns


@every_transpose
def test_layouts_are_those_of_the_transposed_product(trans: tuple[bool, bool]) -> None:
    a, b = operands(trans, torch.float64, "cpu")
    layouts = [Layout.of_transpose(x) for x in (b, a)]
    assert [layout.transposed for layout in layouts] == [trans[1], trans[0]]
    out = as_cublaslt_reads(b, layouts[0]) @ as_cublaslt_reads(a, layouts[1])
    assert torch.equal(out, (a @ b).mT)


def test_layout_of_part_of_a_matrix() -> None:
    whole = torch.arange(60.0).view(6, 10)
    for part in (whole[1:4, 2:7], whole.mT[2:7, 1:4]):
        layout = Layout.of_transpose(part)
        assert layout.leading == 10
        assert torch.equal(as_cublaslt_reads(part, layout), part.mT)


def test_matrix_without_unit_stride() -> None:
    with pytest.raises(ValueError, match=r"a matrix of strides \(20, 2\) has no unit stride"):
        Layout.of_transpose(torch.zeros(4, 20)[:, ::2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu() -> None:
    with pytest.raises(
        (OSError, RuntimeError), match=r"libcublasLt|cublasLtCreate returned status"
    ):
        cublaslt.Library()


@on_gpu
@every_transpose
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to_fp32", [False, True])
def test_fastest(trans: tuple[bool, bool], dtype: torch.dtype, to_fp32: bool) -> None:
    """Sums of 40 products of integers up to 3 are exact in FP16 and, up to 256, in BF16."""
    a, b = operands(trans, dtype, "cuda")
    out_dtype = torch.float32 if to_fp32 else dtype
    outs = [torch.full((24, 16), torch.nan, dtype=out_dtype, device="cuda") for _ in range(2)]
    exact = a.double() @ b.double()
    launches = cublaslt.fastest([(a, b, out) for out in outs])
    for out, launch in zip(outs, launches, strict=True):
        launch()
        assert torch.equal(out.double(), exact.to(out.dtype).double())


@on_gpu
def test_fastest_adds() -> None:
    a, b = operands((True, False), torch.float16, "cuda")
    outs = [torch.zeros(24, 16, device="cuda") for _ in range(2)]
    _, launch = cublaslt.fastest([(a, b, out) for out in outs], beta=1.0)
    for _ in range(3):
        launch()
    assert torch.equal(outs[1].double(), 3 * (a.double() @ b.double()))
