"""The launches that form a product by a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from amp_ext.triton_kernels.gemm.kernels import add_rows_kernel, add_shares_kernel, gemm_kernel
from amp_ext.triton_kernels.gemm.product import Matrices, Product, read
from amp_ext.triton_kernels.gemm.plan import Device, Plan, Tile

ADDING = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
"""Options of the kernels that add up what others left."""


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
    tiling = {"TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k}
    grid = {"tiles_m": plan.tiles_m, "tiles_n": plan.tiles_n}
    operands = _operand("a", p, p.a, tile.m, tile.k, device)
    operands |= _operand("b", p, p.b, tile.k, tile.n, device)
    sizes = {"m": p.out.rows, "n": p.out.columns}
    common = operands | steps | tiling | sizes | {"k": p.a.columns, "TERMS": p.terms > 1}

    if plan.splits == 1:
        parts = _parts(p, tile)
        sums, adding = _column_sums(p, rows_of_tiles, plan.tiles_n * tile.n)
        arguments = common | grid | _epilogue(p) | sums | {"SPLIT": False, "PARTS": parts}
        return [Launch(gemm_kernel, plan.programs, arguments, options), *adding]

    shape = (plan.splits, p.batch, height, width)
    shares = torch.empty(shape, dtype=torch.float32, device=p.out.tensor.device)
    plain = p._replace(
        out=read(shares),
        c=None,
        bias=None,
        aux=None,
        alpha=1.0,
        activation="none",
        derivative=False,
    )
    arguments = common | grid | _epilogue(plain) | {"column_sums": None}
    arguments |= {"SPLIT": True, "PARTS": _parts(plain, tile)}
    summing = Launch(gemm_kernel, plan.programs, arguments, options)

    tile_m, tile_n = min(tile.m, 32), min(tile.n, 64)
    tiles_m, tiles_n = -(-p.out.rows // tile_m), -(-p.out.columns // tile_n)
    sums, adding = _column_sums(p, p.batch * tiles_m, tiles_n * tile_n)
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
        **sums,
    }
    return [
        summing,
        Launch(add_shares_kernel, p.batch * tiles_m * tiles_n, arguments, ADDING),
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


def _parts(p: Product, tile: Tile) -> int:
    return tile.parts(vector=min(abs(x.layout()) for x in (p.out, p.c, p.aux) if x))


def _epilogue(p: Product) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "out": p.out.tensor,
        "out_batch": p.out.batch_stride,
        "out_row": p.out.row_stride,
        "bias": p.bias,
        "alpha": p.alpha,
        "beta": p.beta,
        "OUT_LAYOUT": p.out.layout(),
        "C_LAYOUT": p.c.layout() if p.c else 0,
        "AUX_LAYOUT": p.aux.layout() if p.aux else 0,
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


def _column_sums(p: Product, rows_of_tiles: int, width: int) -> tuple[dict[str, Any], list[Launch]]:
    """Return where tiles leave the sums of their columns, and the launch that adds these up."""
    if p.column_sums is None:
        return {"column_sums": None}, []
    sums = p.column_sums.new_empty(rows_of_tiles, width)
    arguments = {
        "x": sums,
        "out": p.column_sums,
        "rows": rows_of_tiles,
        "columns": p.out.columns,
        "row_stride": sums.stride(0),
        "ROWS": 64,
        "COLUMNS": 32,
    }
    adding = Launch(add_rows_kernel, -(-p.out.columns // 32), arguments, ADDING)
    return {"column_sums": sums}, [adding]
