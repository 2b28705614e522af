"""The GEMM kernel as the CPU executes it, on torch tensors: any plan, or the planner's own."""

from __future__ import annotations

import ctypes
from ctypes import (
    Structure,
    byref,
    c_bool,
    c_double,
    c_int,
    c_int64,
    c_uint8,
    c_uint32,
    c_void_p,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simt.library import Library, Schedule

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # as in amp_ext/dtype.h
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh")  # as in amp_ext/launch.h


class MatrixRef(Structure):
    """amp_ext::MatrixRef."""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_uint8),
        *((f"{name}_stride", c_int64) for name in ("batch", "row", "column")),
    ]

    @classmethod
    def of(cls, tensor: Tensor | None) -> MatrixRef:
        """Return what C knows of a batch of matrices."""
        if tensor is None:
            return cls()
        return cls(tensor.data_ptr(), DTYPES.index(tensor.dtype), *tensor.stride())


class GemmArgs(Structure):
    """amp_ext::GemmArgs."""

    _fields_ = [
        *((name, MatrixRef) for name in ("a", "b", "c", "bias", "aux", "out")),
        *((name, c_int64) for name in ("batch", "terms", "m", "n", "k")),
        *((name, c_double) for name in ("alpha", "beta")),
        ("activation", c_uint8),
        ("derivative", c_bool),
        *((name, c_void_p) for name in ("column_sums", "found_inf")),
    ]


class GemmPlan(Structure):
    """amp_ext::GemmPlan."""

    _fields_ = [
        ("tile", c_int),
        *((name, c_uint8) for name in ("a_major", "b_major")),
        *((name, c_uint32) for name in ("tiles_m", "tiles_n", "blocks", "splits", "group")),
        *((name, c_int) for name in ("terms", "term_steps", "steps")),
        *((name, c_int64) for name in ("column_sums_offset", "workspace_bytes", "tickets")),
    ]


class GemmTile(Structure):
    """amp_ext::GemmTile."""

    _fields_ = [
        *((name, c_int) for name in ("m", "n", "k", "warps_m", "warps_n", "stages")),
        ("aligned", c_bool),
    ]


class GemmWork(Structure):
    """amp_ext::GemmWork."""

    _fields_ = [
        *((name, c_uint32) for name in ("tile", "split")),
        ("batch", c_int64),
        *((name, c_uint32) for name in ("m", "n")),
        ("matrix", c_int64),
        *((name, c_int) for name in ("step", "steps")),
    ]


class Gemm(NamedTuple):
    """A product in the terms of amp_ext::GemmArgs; matrices have three dimensions, bias one."""

    a: Tensor
    b: Tensor
    out: Tensor
    terms: int = 1
    c: Tensor | None = None
    bias: Tensor | None = None
    aux: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: str = "none"
    derivative: bool = False
    column_sums: Tensor | None = None
    found_inf: Tensor | None = None

    def args(self) -> GemmArgs:
        batch, m, n = self.out.shape
        row = None if self.bias is None else self.bias.expand(batch, m, n)
        matrices = (self.a, self.b, self.c, row, self.aux, self.out)
        written = (self.column_sums, self.found_inf)
        return GemmArgs(
            *map(MatrixRef.of, matrices),
            *(batch, self.terms, m, n, self.a.shape[2]),
            *(self.alpha, self.beta, ACTIVATIONS.index(self.activation), self.derivative),
            *(None if tensor is None else tensor.data_ptr() for tensor in written),
        )


def tiles(library: Library) -> list[GemmTile]:
    """Return amp_ext::kGemmTiles."""
    first = ctypes.POINTER(GemmTile)()
    count = library.functions.simt_gemm_tiles(byref(first))
    return first[:count]


def serves(library: Library, args: GemmArgs) -> bool:
    return bool(library.functions.simt_gemm_serves(byref(args)))


def plan(
    library: Library, args: GemmArgs, multiprocessors: int, tile: int = -1, splits: int = 1
) -> GemmPlan:
    """Return the planner's plan, or the one with a tile."""
    result = GemmPlan()
    library.functions.simt_gemm_plan(
        byref(args), multiprocessors, tile, c_int64(splits), byref(result)
    )
    return result


def describe(library: Library, gemm_plan: GemmPlan) -> str:
    text = ctypes.create_string_buffer(400)
    library.functions.simt_gemm_describe(byref(gemm_plan), text, ctypes.c_size_t(len(text)))
    return text.value.decode()


def works(library: Library, gemm_plan: GemmPlan) -> ctypes.Array:
    """Return a GemmWork for each block."""
    result = (GemmWork * gemm_plan.blocks)()
    library.functions.simt_gemm_work(byref(gemm_plan), result)
    return result


def launch(library: Library, schedule: Schedule, args: GemmArgs, gemm_plan: GemmPlan) -> None:
    """Run the kernel; raise RuntimeError with the report where that fails."""
    status = library.call("simt_gemm", schedule, byref(args), byref(gemm_plan))
    if status != 0:
        reason = "a ticket is not 0 again" if status == -1 else library.report()
        raise RuntimeError(f"gemm, {describe(library, gemm_plan)}: {reason}")


def gemm(
    library: Library,
    schedule: Schedule,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    sum_batch: bool = False,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor | None:
    """Return what amp_ext.ops.gemm does, by the planner's plan; None if that is not served."""
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    batch = left.shape[:-2] or right.shape[:-2]
    m, n = left.shape[-2], right.shape[-1]
    shape = (m, n) if sum_batch else (*batch, m, n)
    out = torch.empty(shape, dtype=out_dtype or torch.promote_types(a.dtype, b.dtype))

    def matrices(t: Tensor, count: int) -> Tensor:
        return t.detach().reshape(count, *t.shape[-2:]) if t.dim() > 2 else t.expand(count, -1, -1)

    count = batch.numel()
    products = 1 if sum_batch else count
    if c is not None:
        c = matrices(c.expand(shape), products) if beta != 0 else None
    product = Gemm(
        *(matrices(left, count), matrices(right, count), matrices(out, products)),
        *(count if sum_batch else 1, c),
        beta=beta,
        **options,
    )
    args = product.args()
    if not serves(library, args):
        return None
    launch(library, schedule, args, plan(library, args, schedule.multiprocessors))
    return out
