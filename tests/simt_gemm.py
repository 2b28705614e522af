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


class VectorRef(Structure):
    """amp_ext::VectorRef."""

    _fields_ = [("data", c_void_p), ("dtype", c_uint8), ("stride", c_int64)]

    @classmethod
    def of(cls, tensor: Tensor | None) -> VectorRef:
        if tensor is None:
            return cls()
        return cls(tensor.data_ptr(), DTYPES.index(tensor.dtype), tensor.stride(0))


class GemmArgs(Structure):
    """amp_ext::GemmArgs."""

    _fields_ = [
        *((name, MatrixRef) for name in ("a", "b", "c", "aux", "out")),
        ("bias", VectorRef),
        *((name, c_int64) for name in ("batch", "terms", "m", "n", "k")),
        *((name, c_double) for name in ("alpha", "beta")),
        ("activation", c_uint8),
        ("derivative", c_bool),
        ("column_sums", c_void_p),
    ]


class GemmPlan(Structure):
    """amp_ext::GemmPlan."""

    _fields_ = [
        ("sm90", c_bool),
        ("tile", c_int),
        *((name, c_uint8) for name in ("a_major", "b_major")),
        *((name, c_uint32) for name in ("tiles_m", "tiles_n", "units", "whole", "splits")),
        *((name, c_uint32) for name in ("blocks", "group")),
        *((name, c_int) for name in ("terms", "term_steps", "steps")),
        *((name, c_int) for name in ("cluster_m", "cluster_n", "stages", "boxes", "shared_bytes")),
        ("reduce", c_bool),
        *((name, c_int64) for name in ("column_sums_offset", "workspace_bytes")),
        *((name, c_int64) for name in ("column_tickets", "tickets")),
    ]


class Sm90Tile(Structure):
    """amp_ext::Sm90Tile."""

    STEP = 64  # along k

    _fields_ = [("m", c_int), ("n", c_int), ("ping_pong", c_bool)]

    @property
    def consumers(self) -> int:
        """How many warpgroups compute one tile."""
        return 1 if self.ping_pong else 2


class GemmTile(Structure):
    """amp_ext::GemmTile."""

    _fields_ = [
        *((name, c_int) for name in ("m", "n", "k", "warps_m", "warps_n", "stages")),
        ("aligned", c_bool),
    ]


class GemmWork(Structure):
    """amp_ext::GemmWork."""

    _fields_ = [
        *((name, c_uint32) for name in ("tile", "split", "splits")),
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

    def args(self) -> GemmArgs:
        batch, m, n = self.out.shape
        matrices = (self.a, self.b, self.c, self.aux, self.out)
        sums = None if self.column_sums is None else self.column_sums.data_ptr()
        return GemmArgs(
            *map(MatrixRef.of, matrices),
            VectorRef.of(self.bias),
            *(batch, self.terms, m, n, self.a.shape[2]),
            *(self.alpha, self.beta, ACTIVATIONS.index(self.activation), self.derivative),
            sums,
        )


def tiles(library: Library) -> list[GemmTile]:
    """Return amp_ext::kGemmTiles."""
    first = ctypes.POINTER(GemmTile)()
    count = library.functions.simt_gemm_tiles(byref(first))
    return first[:count]


def sm90_tiles(library: Library) -> list[Sm90Tile]:
    """Return amp_ext::kSm90Tiles."""
    first = ctypes.POINTER(Sm90Tile)()
    count = library.functions.simt_gemm_sm90_tiles(byref(first))
    return first[:count]


def serves(library: Library, args: GemmArgs) -> bool:
    return bool(library.functions.simt_gemm_serves(byref(args)))


def serves_sm90(library: Library, args: GemmArgs) -> bool:
    return bool(library.functions.simt_gemm_serves_sm90(byref(args)))


def plan(
    library: Library,
    args: GemmArgs,
    multiprocessors: int,
    tile: int = -1,
    splits: int = 1,
    sm90: bool = False,
) -> GemmPlan:
    """Return the planner's plan, for a Hopper GPU or not, or that for mma.sync with a tile."""
    result = GemmPlan()
    functions = library.functions
    if tile < 0:
        functions.simt_gemm_plan(byref(args), multiprocessors, c_bool(sm90), byref(result))
    else:
        functions.simt_gemm_plan_with(
            byref(args), multiprocessors, tile, c_int64(splits), byref(result)
        )
    return result


def plan_sm90_with(
    library: Library,
    args: GemmArgs,
    multiprocessors: int,
    tile: int,
    cluster: tuple[int, int] = (1, 1),
    whole: int = 0,
    splits: int = 1,
) -> GemmPlan | None:
    """Return the plan for sm_90a with a tile; None if that cannot compute the product."""
    result = GemmPlan()
    served = library.functions.simt_gemm_plan_sm90_with(
        *(byref(args), multiprocessors, tile, *cluster),
        *(c_uint32(whole), c_int64(splits), byref(result)),
    )
    return result if served else None


def describe(library: Library, gemm_plan: GemmPlan) -> str:
    text = ctypes.create_string_buffer(600)
    library.functions.simt_gemm_describe(byref(gemm_plan), text, ctypes.c_size_t(len(text)))
    return text.value.decode()


def works(library: Library, gemm_plan: GemmPlan) -> ctypes.Array:
    """Return a GemmWork for each unit."""
    result = (GemmWork * gemm_plan.units)()
    library.functions.simt_gemm_work(byref(gemm_plan), result)
    return result


def launch(library: Library, schedule: Schedule, args: GemmArgs, gemm_plan: GemmPlan) -> None:
    """Run the kernel; raise RuntimeError with the report where that fails."""
    status = library.call("simt_gemm", schedule, byref(args), byref(gemm_plan))
    if status != 0:
        reason = "a ticket is not 0 again" if status == -1 else library.report()
        raise RuntimeError(f"gemm: {reason}\n{describe(library, gemm_plan)}")


def _matrices(tensor: Tensor, count: int) -> Tensor:
    """Return the leading dimensions as one, or a single matrix that is repeated."""
    if tensor.dim() == 2:
        return tensor.detach().expand(count, -1, -1)
    return tensor.detach().reshape(count, *tensor.shape[-2:])


def _sm90_plan(library: Library, args: GemmArgs, schedule: Schedule) -> GemmPlan | None:
    """Return a plan for a Hopper GPU, by turns with every tile that serves and every cluster."""
    count = len(sm90_tiles(library))
    cluster = ((1, 1), (2, 1), (1, 2))[
        schedule.seed // count % 3 if schedule.multiprocessors > 1 else 0
    ]
    splits = min(1 + schedule.seed % 3, -(-args.k // Sm90Tile.STEP) * args.terms)
    for turn in range(count):
        tile = (schedule.seed + turn) % count
        found = plan_sm90_with(
            library, args, schedule.multiprocessors, tile, cluster, splits=splits
        )
        if found:
            return found
    return None


def _run(library: Library, schedule: Schedule, product: Gemm, sm90: bool) -> bool:
    """Run a product by the planner's plan, or by the sm90 kernel; return whether it is served."""
    args = product.args()
    if not serves(library, args):
        return False
    found = _sm90_plan(library, args, schedule) if sm90 and serves_sm90(library, args) else None
    launch(library, schedule, args, found or plan(library, args, schedule.multiprocessors))
    return True


def gemm_accumulate_(
    library: Library,
    schedule: Schedule,
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    sum_batch: bool = False,
    sm90: bool = False,
    **options: Any,
) -> bool:
    """Do what amp_ext.ops.gemm_accumulate_ does, and return whether that is served."""
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    count = (left.shape[:-2] or right.shape[:-2]).numel()
    out = _matrices(c, 1 if sum_batch else count)
    if out.data_ptr() != c.data_ptr():
        return False
    operands = _matrices(left, count), _matrices(right, count), out
    terms = count if sum_batch else 1
    return _run(library, schedule, Gemm(*operands, terms, c=out, **options), sm90)


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
    sm90: bool = False,
    **options: Any,
) -> Tensor | None:
    """Return what amp_ext.ops.gemm does, by the planner's plan; None if that is not served."""
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    batch = left.shape[:-2] or right.shape[:-2]
    m, n = left.shape[-2], right.shape[-1]
    shape = (m, n) if sum_batch else (*batch, m, n)
    out = torch.empty(shape, dtype=out_dtype or torch.promote_types(a.dtype, b.dtype))

    count = batch.numel()
    products = 1 if sum_batch else count
    if c is not None:
        c = _matrices(c.expand(shape), products) if beta != 0 else None
    operands = _matrices(left, count), _matrices(right, count), _matrices(out, products)
    product = Gemm(*operands, count if sum_batch else 1, c, beta=beta, **options)
    return out if _run(library, schedule, product, sm90) else None
