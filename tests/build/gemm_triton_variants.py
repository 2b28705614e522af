"""The kernels of gemm as its launches call them: every tile, the layouts, and some epilogues."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from triton_variants import Variant

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MULTIPLY = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}

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
    "splits": (2, 4, {"bias": HALF, "activation": "silu"}),
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
    return importlib.import_module(f"amp_ext.triton_kernels.gemm.{name}")


def _product(
    m: int = 512,
    n: int = 512,
    k: int = 512,
    terms: int = 1,
    dtype: torch.dtype = HALF,
    trans: tuple[bool, bool] = (False, True),
    out: torch.dtype | None = None,
    c: torch.dtype | None = None,
    aux: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    activation: str = "none",
    derivative: bool = False,
) -> Any:
    product = _module("product")

    def matrices(of: torch.dtype, rows: int, columns: int, trans: bool = False) -> Any:
        shape = (terms, columns, rows) if trans else (terms, rows, columns)
        tensor = torch.empty(shape, dtype=of, device="meta")
        return product.matrices(tensor.mT if trans else tensor)

    def result(of: torch.dtype | None) -> Any:
        return of and matrices(of, m, n)._replace(count=1, batch_stride=0)

    return product.Product(
        a=matrices(dtype, m, k, trans[0]),
        b=matrices(dtype, k, n, trans[1]),
        out=result(out or dtype),
        c=result(c),
        aux=result(aux),
        bias=bias,
        has_column_sums=derivative,
        batch=1,
        terms=terms,
        activation=activation,
        derivative=derivative,
    )


def _variant(
    launch: Any, types: dict[str, torch.dtype | None], name: str, arch: int, needed: list[str]
) -> Variant:
    """Return Triton's input for a launch: absent tensors are constants, others aligned."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        given = launch.values.get(parameter.name)
        of = types.get(given)
        if parameter.name in launch.descriptors:
            block = ",".join(map(str, launch.descriptors[parameter.name][2]))
            signature[parameter.name] = f"tensordesc<{TYPES[of]}[{block}]>"
        elif of:
            signature[parameter.name] = "*" + TYPES[of]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        else:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = launch.arguments.get(parameter.name)
    return Variant(
        f"{launch.kernel.__name__} {name}",
        launch.kernel,
        signature,
        constexprs,
        launch.options,
        tuple(needed),
        attributes,
        (arch,),
    )


def _variants_of(
    arch: int, number: int, splits: int, name: str, tma: bool, options: dict[str, Any]
) -> Iterator[Variant]:
    plans = _module("plan")
    table = plans.Device(arch, MULTIPROCESSORS[arch], SHARED[arch])
    device = table if tma else table._replace(capability=80)
    types = {"bias": options.get("bias")}
    product = _product(**options)
    types |= {
        name: x.dtype for name in ("out", "a", "b", "c", "aux") if (x := getattr(product, name))
    }
    types |= dict.fromkeys(("shares", "sums_of_tiles"), FLOAT)
    types["column_sums"] = FLOAT if product.has_column_sums else None
    problem = product.problem(device.has_tma)
    tile = plans.UNALIGNED if problem.vector == 1 else table.architecture.tiles[number]
    plan = plans.plan_with(problem, tile, splits, table)
    for launch in _module("launches").launches(product, plan, device).steps:
        arguments = launch.arguments
        needed = ["STG.E.128" if problem.vector == 8 else "STG"]
        if launch.kernel.__name__ == "gemm_kernel":
            needed = ["HMMA" if tile.m < 64 else MULTIPLY[arch]]
            needed += ["UTMALDG"] if arguments["A_TMA"] else []
            needed += ["LDGSTS.E.BYPASS"] if arguments["A_LAYOUT"] == 8 and not tma else []
        elif launch.kernel.__name__ == "add_rows_kernel":
            needed = []
        label = f"{tile.m}x{tile.n}x{tile.k}, {name}"
        yield _variant(launch, types, label, arch, needed)


def gemm_variants() -> Iterator[Variant]:
    """Return every tile with both dtypes in turn, then the epilogues, then pointers where TMA is
    usual.
    """
    for arch in MULTIPROCESSORS:
        table = _module("plan").Device(arch, 1, 1).architecture.tiles
        for number, tile in enumerate(table):
            if tile.shared_bytes > SHARED[arch]:  # as in a plan
                continue
            dtype, trans = ((HALF, (False, True)), (BRAIN, (False, False)))[number % 2]
            name = f"{TYPES[dtype]} {'tn'[not trans[0]]}{'nt'[trans[1]]}"
            yield from _variants_of(arch, number, 1, name, True, {"dtype": dtype, "trans": trans})
        if arch in (89, 120):  # the kernels of 80, with less shared memory
            continue
        epilogues = EPILOGUES | ODD_ROWS if arch == 90 else EPILOGUES
        for name, (number, splits, options) in epilogues.items():
            yield from _variants_of(arch, number, splits, name, True, options)
        if arch >= 90:
            yield from _variants_of(arch, 2, 1, "pointers", False, {})
