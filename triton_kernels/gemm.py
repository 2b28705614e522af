"""GEMMs with fused epilogues: from tensors to launches."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext.triton_kernels.gemm_kernels import add_rows_kernel, add_shares_kernel, gemm_kernel
from amp_ext.triton_kernels.gemm_operands import Matrices, read, with_aligned_rows
from amp_ext.triton_kernels.gemm_plan import INTERPRETED_DEVICE, Device, Plan, Problem, candidates
from amp_ext.triton_kernels.numerics import INTERPRETED

WORTH_A_COPY = 256
"""Uses of each element of an operand, from which on a copy that TMA takes is sooner ready than
loads of single elements. (Not under the interpreter, which is to see these.)
"""

LIMIT = 2**31 - 2**16
"""Of m, n, k and the number of units, which the kernels count in 32 bits."""


class Product(NamedTuple):
    """act(alpha * a @ b + beta * c + bias), or alpha * a @ b * act'(aux), and where it goes."""

    a: Matrices
    b: Matrices
    out: Matrices
    c: Matrices | None
    bias: Tensor | None
    aux: Matrices | None
    column_sums: Tensor | None
    found_inf: Tensor | None
    square_sum: Tensor | None
    batch: int
    terms: int
    alpha: float
    beta: float
    activation: str
    derivative: bool

    def joined(self) -> Product:
        """Return one long product instead of a sum of several, one tall one instead of a batch."""
        p = self
        if p.terms > 1:
            a, b = p.a.joined(p.terms, rows=False), p.b.joined(p.terms, rows=True)
            if a and b and a.columns <= LIMIT:
                return p._replace(a=a, b=b, terms=1)
        elif p.batch > 1 and p.b.batch_stride == 0:
            tall = [x and x.joined(p.batch, rows=True) for x in (p.a, p.out, p.c, p.aux)]
            if [x is None for x in tall] == [False, False, p.c is None, p.aux is None]:
                a, out, c, aux = tall
                if out.rows <= LIMIT:
                    return p._replace(a=a, out=out, c=c, aux=aux, batch=1)
        return p

    def count(self, operand: Matrices) -> int:
        """Return how many matrices of an operand there are in memory."""
        return max(self.batch, self.terms) if operand.batch_stride else 1

    def problem(self, has_tma: bool) -> Problem:
        vectors = [
            8 if has_tma and x.stored(self.count(x)) else max(1, abs(x.layout()))
            for x in (self.a, self.b)
        ]
        written = [x for x in (self.out, self.c, self.aux) if x]
        return Problem(
            m=self.out.rows,
            n=self.out.columns,
            k=self.a.columns,
            batch=self.batch,
            terms=self.terms,
            element_bytes=sum(x.tensor.element_size() for x in written),
            vector=min(vectors),
        )


def gemm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    aux: Tensor | None,
    column_sums: Tensor | None,
    found_inf: Tensor | None,
    square_sum: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    sum_batch: bool,
    alpha: float,
    beta: float,
    activation: str,
    derivative: bool,
) -> None:
    """x = alpha * A @ B + beta * c + bias in fp32; out = act(x), or x * act'(aux).

    Args:
        out: fp16, bf16 or fp32, [*, m, n], or [m, n] with sum_batch; row-major.
        a, b: fp16 or bf16, both the same, any strides; [*, m, k] and [*, k, n], or transposed.
            Leading dimensions are equal, or absent in one of the two.
        c: of out's shape, any floating dtype and strides; may be out itself.
        bias: [n], any floating dtype.
        aux: with `derivative`, what act' is taken of, any floating dtype and strides; without, x is
            written to it, which is like out.
        column_sums: fp32, [n]: receives the sums of the unrounded results of each column.
        found_inf: fp32, 1 element: set to 1 if a result is not finite, once rounded.
        square_sum: fp64, 1 element: receives the sum of the squares of the rounded results.
        trans_a, trans_b: whether a is [*, k, m], and b [*, n, k].
        sum_batch: whether the products are summed over the leading dimensions.
        alpha, beta: factors; with a beta of 0 c is not read.
        activation: "none", "relu", "gelu" or "gelu_tanh".
        derivative: see above.
    """
    if out.numel() == 0:
        for sums in (column_sums, square_sum):
            if sums is not None:
                sums.zero_()
        return
    device = device_of(out)
    product = Product(
        a=_operand_of(a, trans_a, uses=out.size(-1), device=device),
        b=_operand_of(b, trans_b, uses=out.size(-2), device=device),
        out=read(out),
        c=None if c is None or beta == 0 else read(c),
        bias=None if bias is None else bias.contiguous(),
        aux=None if aux is None else read(aux),
        column_sums=column_sums,
        found_inf=found_inf,
        square_sum=square_sum,
        batch=math.prod(out.shape[:-2]),
        terms=math.prod(a.shape[:-2]) if sum_batch else 1,
        alpha=ctypes.c_float(alpha).value,
        beta=ctypes.c_float(beta).value,
        activation=activation,
        derivative=derivative,
    ).joined()
    problem = product.problem(device.has_tma)
    plans = candidates(problem, device)
    if len(plans) > 1 and os.environ.get("AMP_EXT_TRITON_AUTOTUNE") == "1":
        from amp_ext.triton_kernels.gemm_autotune import fastest

        plan = fastest(product, problem, plans, device)
    else:
        plan = plans[0]
    if max(problem.m, problem.n, problem.k, plan.units) > LIMIT:
        raise NotImplementedError(f"gemm: m, n, k and the number of tiles must be <= {LIMIT}")
    for launch in launches(product, plan, device):
        launch.run()


def _operand_of(tensor: Tensor, transposed: bool, uses: int, device: Device) -> Matrices:
    matrices = read(tensor, transposed)
    worth = uses >= WORTH_A_COPY and min(matrices.rows, matrices.columns) >= WORTH_A_COPY
    if not worth or INTERPRETED or not device.has_tma:
        return matrices
    count = tensor.shape[:-2].numel() if matrices.batch_stride else 1
    if matrices.stored(count) is None:
        return read(with_aligned_rows(tensor), transposed)
    return matrices


def device_of(tensor: Tensor) -> Device:
    return INTERPRETED_DEVICE if INTERPRETED else _device(tensor.device.index)


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        capability=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )


class Launch(NamedTuple):
    """A kernel and what it is called with."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[(self.programs,)](**self.arguments, **self.options)


def launches(p: Product, plan: Plan, device: Device) -> list[Launch]:
    """Return the launches that form a product, and allocate what passes between them."""
    tile, rows_of_tiles = plan.tile, p.batch * plan.tiles_m
    height, width = plan.tiles_m * tile.m, plan.tiles_n * tile.n
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    steps = {
        "units": plan.units,
        "steps": plan.steps,
        "steps_of_term": plan.steps_of_term,
        "splits": plan.splits,
        "group": plan.group,
    }
    tiling = {"TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k, "PARTS": tile.parts}
    grid = {"tiles_m": plan.tiles_m, "tiles_n": plan.tiles_n}
    operands = _operand("a", p, p.a, tile.m, tile.k, device)
    operands |= _operand("b", p, p.b, tile.k, tile.n, device)
    sizes = {"m": p.out.rows, "n": p.out.columns}
    common = operands | steps | tiling | sizes | {"k": p.a.columns, "TERMS": p.terms > 1}

    if plan.splits == 1:
        reports, adding = _reports(p, rows_of_tiles, plan.tiles_n, tile.n, tile.parts)
        arguments = common | grid | _epilogue(p) | reports | {"SPLIT": False}
        return [Launch(gemm_kernel, plan.programs, arguments, options), *adding]

    shape = (plan.splits, p.batch, height, width)
    shares = torch.empty(shape, dtype=torch.float32, device=p.out.tensor.device)
    plain = Product(
        *(p.a, p.b, read(shares), None, None, None, None, None, None),
        *(p.batch, p.terms, 1.0, 0.0, "none", False),
    )
    nothing = {"column_sums": None, "square_sums": None}
    arguments = common | grid | _epilogue(plain) | nothing | {"SPLIT": True}
    summing = Launch(gemm_kernel, plan.programs, arguments, options)

    tile_m, tile_n = min(tile.m, 32), min(tile.n, 64)
    tiles_m, tiles_n = -(-p.out.rows // tile_m), -(-p.out.columns // tile_n)
    reports, adding = _reports(p, p.batch * tiles_m, tiles_n, tile_n, 1)
    arguments = {
        "shares": shares,
        "share_stride": shares.stride(0),
        "share_batch": shares.stride(1),
        "share_row": width,
        "splits": plan.splits,
        **sizes,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        **_epilogue(p),
        **reports,
    }
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    return [
        summing,
        Launch(add_shares_kernel, p.batch * tiles_m * tiles_n, arguments, options),
        *adding,
    ]


def _operand(
    name: str, p: Product, x: Matrices, tile_rows: int, tile_columns: int, device: Device
) -> dict[str, Any]:
    count = p.count(x)
    descriptor = x.descriptor(count, tile_rows, tile_columns) if device.has_tma else None
    layout, stride = x.layout(), x.batch_stride
    if descriptor is not None:
        layout, stride = 1 if x.column_stride == 1 else -1, int(count > 1)
    return {
        name: x.tensor if descriptor is None else descriptor,
        f"{name}_batch": stride if p.terms == 1 else 0,
        f"{name}_term": stride if p.terms > 1 else 0,
        f"{name}_row": x.row_stride,
        f"{name}_column": x.column_stride,
        f"{name.upper()}_TMA": descriptor is not None,
        f"{name.upper()}_LAYOUT": layout,
    }


def _epilogue(p: Product) -> dict[str, Any]:
    out_layout, aux_layout = p.out.layout(), p.aux.layout() if p.aux else 0
    if p.aux and not p.derivative:
        out_layout, aux_layout = min(out_layout, aux_layout, key=abs), 0
    arguments: dict[str, Any] = {
        "out": p.out.tensor,
        "out_batch": p.out.batch_stride,
        "out_row": p.out.row_stride,
        "bias": p.bias,
        "found_inf": p.found_inf,
        "alpha": p.alpha,
        "beta": p.beta,
        "OUT_LAYOUT": out_layout,
        "C_LAYOUT": p.c.layout() if p.c else 0,
        "AUX_LAYOUT": aux_layout,
        "ACTIVATION": p.activation,
        "DERIVATIVE": p.derivative,
    }
    for name, x in (("c", p.c), ("aux", p.aux)):
        arguments |= {
            name: x.tensor if x else None,
            f"{name}_batch": x.batch_stride if x else 0,
            f"{name}_row": x.row_stride if x else 0,
            f"{name}_column": x.column_stride if x else 0,
        }
    return arguments


def _reports(
    p: Product, rows_of_tiles: int, tiles_n: int, tile_n: int, parts: int
) -> tuple[dict[str, Any], list[Launch]]:
    """Return where tiles leave what they report, and the launches that add that up."""
    columns = squares = None
    adding = []
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    if p.column_sums is not None:
        columns = p.column_sums.new_empty(rows_of_tiles, tiles_n * tile_n)
        arguments = {
            **{"x": columns, "out": p.column_sums, "rows": rows_of_tiles},
            **{"columns": p.out.columns, "row_stride": columns.stride(0)},
            **{"ROWS": 64, "COLUMNS": 32},
        }
        adding.append(Launch(add_rows_kernel, -(-p.out.columns // 32), arguments, options))
    if p.square_sum is not None:
        squares = p.square_sum.new_empty(rows_of_tiles * tiles_n * parts)
        arguments = {
            **{"x": squares, "out": p.square_sum, "rows": len(squares)},
            **{"columns": 1, "row_stride": 1, "ROWS": 2048, "COLUMNS": 1},
        }
        adding.append(Launch(add_rows_kernel, 1, arguments, options))
    return {"column_sums": columns, "square_sums": squares}, adding
