"""The launches that compute a product by a plan."""

from __future__ import annotations

from typing import Any

import torch
from amp_ext.triton_kernels.gemm.kernels import add_rows_kernel, add_shares_kernel, gemm_kernel
from amp_ext.triton_kernels.gemm.plan import Device, Plan
from amp_ext.triton_kernels.gemm.product import Matrices, Product
from amp_ext.triton_kernels.launch import launch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

ADDING = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
"""Options of the kernels that add up what others left."""
VALUES = ("out", "a", "b", "c", "bias", "aux", "column_sums", "alpha", "beta")
"""What differs from call to call."""
SCRATCH = ("shares", "sums_of_tiles")
"""fp32 memory that passes something from launch to launch, behind the values."""


class _Address(int):
    """Where Triton expects a tensor."""

    def data_ptr(self) -> int:
        return self


class _Descriptor(TensorDescriptor):
    """One of an address. It need not be checked at every launch: Matrices.stored() has."""

    def __post_init__(self) -> None:
        self.base = _Address(self.base)


class Launch:
    """A kernel, and all of its arguments but those that differ from call to call.

    Args:
        values: the parameters that get one of VALUES or SCRATCH, with its name.
        descriptors: shape, strides and tile of each that TMA loads.
        arguments: numbers and constants. All other parameters are None.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        values: dict[str, str],
        descriptors: dict[str, tuple[list[int], list[int], list[int]]],
        arguments: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.programs, self.values = kernel, programs, values
        self.descriptors, self.arguments, self.options = descriptors, arguments, options
        names, sources = kernel.arg_names, (*VALUES, *SCRATCH)
        self._fixed = [arguments.get(name) for name in names]
        self._values = [(names.index(name), sources.index(x)) for name, x in values.items()]
        self._descriptors = [(names.index(name), x) for name, x in descriptors.items()]
        self._compiled: Any = None

    def run_first(self, values: tuple[Any, ...]) -> None:
        """Launch it for tensors, for which it is compiled."""
        arguments = self._with(values, TensorDescriptor)
        self._compiled = self.kernel[(self.programs,)](*arguments, **self.options)

    def run(self, stream: int, values: tuple[Any, ...]) -> None:
        """Launch it again, for addresses that are multiples of 16 where the first ones were."""
        launch(self._compiled, self.programs, stream, self._with(values, _Descriptor))

    def _with(self, values: tuple[Any, ...], descriptor: type) -> list[Any]:
        arguments = self._fixed.copy()
        for index, source in self._values:
            arguments[index] = values[source]
        for index, layout in self._descriptors:
            arguments[index] = descriptor(arguments[index], *layout)
        return arguments


class Launches:
    """What computes a product.

    Args:
        scratch: the elements of SCRATCH that it needs.
        steps: in their order.
    """

    def __init__(self, scratch: dict[str, int], steps: list[Launch]) -> None:
        self.steps = steps
        self._scratch = [scratch.get(name, 0) for name in SCRATCH]
        self._shares_bytes = 4 * self._scratch[0]
        self.scratch_bytes = 4 * sum(self._scratch)
        self._device: int | None = None

    def run_first(self, values: tuple[Any, ...]) -> None:
        """Launch all for VALUES, tensors where they are not numbers; None where there is none."""
        self._device = values[0].device.index
        scratch = values[0].new_empty(sum(self._scratch), dtype=torch.float32).split(self._scratch)
        for step in self.steps:
            step.run_first((*values, *scratch))

    def run(self, scratch: int, *values: float) -> None:
        """Launch all again, on the same device, which is the current one.

        Args:
            scratch: the address of scratch_bytes bytes.
            values: VALUES with addresses for tensors, and any number where there is none.
        """
        stream = driver.active.get_current_stream(self._device)
        values = (*values, scratch, scratch + self._shares_bytes)
        for step in self.steps:
            step.run(stream, values)


def launches(p: Product, plan: Plan, device: Device) -> Launches:
    """Return the launches that compute a product by a plan."""
    tile = plan.tile
    scratch: dict[str, int] = {}
    arguments = {
        "units": plan.units,
        "steps": plan.steps,
        "steps_of_term": plan.steps_of_term,
        "splits": plan.splits,
        "group": plan.group,
        "tiles_m": plan.tiles_m,
        "tiles_n": plan.tiles_n,
        "m": p.out.rows,
        "n": p.out.columns,
        "k": p.a.columns,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "TILE_K": tile.k,
        "TERMS": p.terms > 1,
        "SPLIT": plan.splits > 1,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    descriptors = {}
    for name, x, extent in (("a", p.a, (tile.m, tile.k)), ("b", p.b, (tile.k, tile.n))):
        stored = x.stored() if device.has_tma else None
        layout, stride = x.layout(), x.batch_stride
        if stored:
            layout, stride = 1 if x.column_stride == 1 else -1, int(x.count > 1)
            descriptors[name] = (*stored, [1, *extent[::layout]])
        arguments |= {
            f"{name}_batch": stride if p.terms == 1 else 0,
            f"{name}_term": stride if p.terms > 1 else 0,
            f"{name}_row": x.row_stride,
            f"{name}_column": x.column_stride,
            f"{name.upper()}_TMA": stored is not None,
            f"{name.upper()}_LAYOUT": layout,
        }

    if plan.splits == 1:
        written, tiles, width = p, p.batch * plan.tiles_m, plan.tiles_n * tile.n
        values = _epilogue_values(p)
        steps = []
    else:
        height, width = plan.tiles_m * tile.m, plan.tiles_n * tile.n
        share = height * width
        scratch["shares"] = plan.splits * p.batch * share
        shares = Matrices(torch.float32, plan.splits, height, width, share, width, 1, True)
        written = p._replace(out=shares, c=None, aux=None, activation="none", derivative=False)
        values = {"out": "shares"}
        arguments |= {"alpha": 1.0, "beta": 1.0}

        tile_m, tile_n = min(tile.m, 32), min(tile.n, 64)
        tiles_m, tiles_n = -(-p.out.rows // tile_m), -(-p.out.columns // tile_n)
        tiles = p.batch * tiles_m
        adding = {
            "share_stride": p.batch * share,
            "share_batch": share,
            "share_row": width,
            "splits": plan.splits,
            "m": p.out.rows,
            "n": p.out.columns,
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "TILE_M": tile_m,
            "TILE_N": tile_n,
            **_epilogue(p),
        }
        width = tiles_n * tile_n
        names = {"shares": "shares", **_epilogue_values(p)}
        steps = [Launch(add_shares_kernel, tiles * tiles_n, names, {}, adding, ADDING)]

    values |= {"a": "a", "b": "b"}
    vector = min(abs(x.layout()) for x in (written.out, written.c, written.aux) if x)
    arguments |= {**_epilogue(written), "PARTS": tile.parts(vector)}
    steps.insert(0, Launch(gemm_kernel, plan.programs, values, descriptors, arguments, options))
    if p.has_column_sums:
        scratch["sums_of_tiles"] = tiles * width
        arguments = {
            "rows": tiles,
            "columns": p.out.columns,
            "row_stride": width,
            "ROWS": 64,
            "COLUMNS": 32,
        }
        names = {"x": "sums_of_tiles", "out": "column_sums"}
        programs = -(-p.out.columns // 32)
        steps.append(Launch(add_rows_kernel, programs, names, {}, arguments, ADDING))
    return Launches(scratch, steps)


def _epilogue_values(p: Product) -> dict[str, str]:
    given = {"out": "out", "alpha": "alpha", "beta": "beta"}
    given |= {name: name for name in ("c", "bias", "aux") if getattr(p, name)}
    return given | ({"column_sums": "sums_of_tiles"} if p.has_column_sums else {})


def _epilogue(p: Product) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "out_batch": p.out.batch_stride,
        "out_row": p.out.row_stride,
        "OUT_LAYOUT": p.out.layout(),
        "ACTIVATION": p.activation,
        "DERIVATIVE": p.derivative,
    }
    for name, x in (("c", p.c), ("aux", p.aux)):
        arguments |= {
            f"{name}_batch": x.batch_stride if x else 0,
            f"{name}_row": x.row_stride if x else 0,
            f"{name}_column": x.column_stride if x else 0,
            f"{name.upper()}_LAYOUT": x.layout() if x else 0,
        }
    return arguments
