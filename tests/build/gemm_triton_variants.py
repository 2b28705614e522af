"""The kernels of gemm as its launches call them: every tile, the layouts, and some epilogues."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from triton_variants import Variant

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MULTIPLY = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32

# Name -> (the number of the tile in its architecture's table, splits, options of `_product`).
# Odd sizes take UNALIGNED.
EPILOGUES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "bias gelu": (0, 1, {"bias": BRAIN, "activation": "gelu", "dtype": BRAIN}),
    "accumulated": (0, 1, {"c": FLOAT, "out": FLOAT, "trans": (True, False)}),
    "derivative, column sums": (
        2,
        1,
        {"aux": HALF, "activation": "gelu_tanh", "derivative": True, "trans": (False, False)},
    ),
    "splits": (2, 4, {"bias": HALF, "activation": "relu"}),
    "odd sizes": (0, 1, {"m": 511, "n": 513, "k": 515}),
    "terms": (4, 1, {"terms": 3, "trans": (True, False), "out": FLOAT}),
}

# For sm_90, which has the fewest registers for them: results with rows that are not aligned.
ODD_ROWS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "odd rows, accumulated": (2, 1, {"n": 513, "c": FLOAT, "out": FLOAT}),
    "odd rows, bias gelu": (
        2,
        1,
        {"n": 513, "bias": BRAIN, "aux": BRAIN, "activation": "gelu", "dtype": BRAIN},
    ),
}


def _module(name: str) -> Any:
    return importlib.import_module(f"amp_ext.triton_kernels.{name}")


def _product(
    m: int = 512,
    n: int = 512,
    k: int = 512,
    terms: int = 1,
    dtype: torch.dtype = HALF,
    trans: tuple[bool, bool] = (False, True),
    out: torch.dtype | None = None,
    c: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    aux: torch.dtype | None = None,
    activation: str = "none",
    derivative: bool = False,
) -> Any:
    operands = _module("gemm_operands")

    def matrix(shape: tuple[int, ...], of: torch.dtype | None, transposed: bool = False) -> Any:
        return None if of is None else operands.read(torch.empty(shape, dtype=of), transposed)

    several = (terms,) if terms > 1 else ()
    return operands.Product(
        a=matrix((*several, *((k, m) if trans[0] else (m, k))), dtype, trans[0]),
        b=matrix((*several, *((n, k) if trans[1] else (k, n))), dtype, trans[1]),
        out=matrix((m, n), out or dtype),
        c=matrix((m, n), c),
        bias=None if bias is None else torch.empty(n, dtype=bias),
        aux=matrix((m, n), aux),
        column_sums=torch.empty(n) if derivative else None,
        batch=1,
        terms=terms,
        alpha=1.0,
        beta=1.0,
        activation=activation,
        derivative=derivative,
    )


def _variant(launch: Any, name: str, arch: int, needed: tuple[str, ...]) -> Variant:
    """What Triton compiles of a launch: absent tensors are constants, aligned ones known."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            specialized = not parameter.do_not_specialize_on_alignment
            if specialized and value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}]>"
        else:
            signature[parameter.name] = parameter.annotation_type
    return Variant(
        f"{launch.kernel.__name__} {name}",
        launch.kernel,
        signature,
        constexprs,
        launch.options,
        needed,
        attributes,
        (arch,),
    )


def _variants_of(
    arch: int, number: int, splits: int, name: str, tma: bool, options: dict[str, Any]
) -> Iterator[Variant]:
    plans = _module("gemm_plan")
    capability = arch if tma else min(arch, 80)
    table = plans.Device(arch, MULTIPROCESSORS[arch], SHARED[arch])
    device = table._replace(capability=capability)
    product = _product(**options).joined()
    problem = product.problem(device.has_tma)
    tile = plans.UNALIGNED if problem.vector == 1 else table.architecture.tiles[number]
    plan = plans.plan_with(problem, tile, splits, table)
    for launch in _module("gemm_launches").launches(product, plan, device):
        arguments = launch.arguments
        needed = ["STG.E.128" if problem.vector == 8 else "STG"]
        if launch.kernel.__name__ == "gemm_kernel":
            needed = ["HMMA" if tile.m < 64 else MULTIPLY[arch]]
            needed += ["UTMALDG"] if arguments["A_TMA"] else []
            needed += ["LDGSTS.E.BYPASS"] if arguments["A_LAYOUT"] == 8 and not tma else []
        elif launch.kernel.__name__ == "add_rows_kernel":
            needed = []
        label = f"{tile.m}x{tile.n}x{tile.k}, {name}"
        yield _variant(launch, label, arch, tuple(needed))


def gemm_variants() -> Iterator[Variant]:
    """Every tile, of both dtypes in turn; then the epilogues; then pointers where TMA is usual."""
    for arch in MULTIPROCESSORS:
        table = _module("gemm_plan").Device(arch, 1, 1).architecture.tiles
        for number in range(len(table)):
            dtype, trans = ((HALF, (False, True)), (BRAIN, (False, False)))[number % 2]
            name = f"{TYPES[dtype]} {'tn'[not trans[0]]}{'nt'[trans[1]]}"
            yield from _variants_of(arch, number, 1, name, True, {"dtype": dtype, "trans": trans})
        epilogues = EPILOGUES | ODD_ROWS if arch == 90 else EPILOGUES
        for name, (number, splits, options) in epilogues.items():
            yield from _variants_of(arch, number, splits, name, True, options)
        if arch >= 90:
            yield from _variants_of(arch, 2, 1, "pointers", False, {})
