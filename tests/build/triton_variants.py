"""List the Triton kernels as they are launched, for tests/build/triton_check.py."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel, the types of its arguments, and its options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    needed: tuple[str, ...]  # instructions, as sass.Kernel.count takes them
    archs: tuple[int, ...] = (80, 89, 90, 100, 120)
    programs: int = 1  # for each multiprocessor, which must have registers for all of them
    last_reads: bool = False  # whether the last program reads memory that the others wrote


READS, WRITES = "LDG.E.128", "STG.E.128"
ACCESSES = {
    "check_finite_kernel": (READS,),
    "grad_norm_kernel": (READS,),
    "update_scale_kernel": (),
}
"""The 16-byte accesses of kernels that do not both read and write lists."""


def list_variants() -> Iterator[Variant]:
    """Yield the kernels of lists and optim."""
    import amp_ext.triton_kernels as package
    from amp_ext.triton_kernels.launch import Launcher

    found: list[Any] = []
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        found += vars(importlib.import_module(module.name)).values()
    for launcher in found:
        if not isinstance(launcher, Launcher):
            continue
        name = launcher.kernel.__name__
        types = {p.name: p.annotation_type for p in launcher.kernel.params}
        yield Variant(
            name,
            launcher.kernel,
            types,
            {},
            launcher.options,
            ACCESSES.get(name, (READS, WRITES)),
            programs=getattr(launcher, "programs", 1),
            last_reads="ticket" in types,
        )


MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}
MULTIPLY = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
FLOAT, HALF, BRAIN = range(3)
"""The numbers of dtypes in csrc/include/amp_ext/dtype.h."""
TYPES = {HALF: "fp16", BRAIN: "bf16"}
LARGE = (1, 1, 4096, 4096, 512)
"""Batch, terms, m, n and k of a product."""
MIDDLE, SMALL, FEW = (1, 1, 1024, 2048, 256), (1, 1, 512, 512, 512), (1, 1, 16, 4096, 4096)
SPLIT, ODD = (1, 1, 1024, 1024, 8192), (1, 1, 1024, 2049, 256)

# Name -> options of `_variant`. Odd sizes have a tile of their own.
EPILOGUES: dict[str, dict[str, Any]] = {
    "bias": {"sizes": LARGE, "bias": BRAIN, "dtype": BRAIN},
    "accumulated": {"sizes": LARGE, "c": FLOAT, "out": FLOAT, "trans": (True, False)},
    "c, bias": {"sizes": MIDDLE, "c": HALF, "bias": HALF, "trans": (False, False)},
    "splits": {"sizes": SPLIT, "bias": HALF},
    "odd sizes": {"sizes": (1, 1, 511, 513, 515)},
    "terms": {"sizes": (1, 3, 1024, 2048, 256), "trans": (True, False), "out": FLOAT},
}

# Results with unaligned rows, for sm_90: it has the fewest registers for them.
ODD_ROWS: dict[str, dict[str, Any]] = {
    "odd rows, accumulated": {"sizes": ODD, "c": FLOAT, "out": FLOAT, "bias": BRAIN},
    "odd rows, bias": {"sizes": ODD, "bias": BRAIN, "dtype": BRAIN},
}


def _variant(
    arch: int,
    name: str,
    sizes: tuple[int, int, int, int, int],
    has_tma: bool = True,
    dtype: int = HALF,
    trans: tuple[bool, bool] = (False, True),
    out: int | None = None,
    c: int | None = None,
    bias: int | None = None,
) -> Variant:
    """Return the kernel of a product. Its matrices are contiguous where their rows are aligned."""
    from amp_ext.triton_kernels.gemm.gemm import product
    from amp_ext.triton_kernels.gemm.kernel import gemm_kernel
    from amp_ext.triton_kernels.gemm.plan import Device

    def matrix(of: int | None, rows: int, columns: int, trans: bool = False) -> Any:
        strides = (1, rows) if trans else (columns, 1)
        return None if of is None else (of, rows * columns, *strides, True)

    _, _, m, n, k = sizes
    matrices = (
        matrix(dtype if out is None else out, m, n),
        matrix(dtype, m, k, trans[0]),
        matrix(dtype, k, n, trans[1]),
        matrix(c, m, n),
    )
    device = Device(arch if has_tma else 80, MULTIPROCESSORS[arch])
    launch = product(device, 0, 0, sizes, bias, *matrices)
    form = launch.form
    maps = dict(zip(("a_map", "b_map"), launch.maps, strict=True))
    signature, constexprs = {}, {}
    for parameter in gemm_kernel.params:
        found = maps.get(parameter.name)
        if found:
            block = ",".join(map(str, found.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[dtype]}[{block}]>"
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        else:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = form if parameter.is_constexpr else None
    needed = ["HMMA" if form.tile_m.value < 64 else MULTIPLY[arch]]
    needed += ["STG.E.128" if n % 8 == 0 else "STG"]
    needed += ["UTMALDG"] if any(maps.values()) else []
    needed += ["LDGSTS.E.BYPASS"] if not any(maps.values()) and k % 8 == n % 8 == 0 else []
    return Variant(
        f"gemm_kernel {name}",
        gemm_kernel,
        signature,
        constexprs,
        launch.options,
        tuple(needed),
        archs=(arch,),
        last_reads=form.is_split.value,
    )


def gemm_variants() -> Iterator[Variant]:
    """Yield every tile, of both dtypes in turn; the epilogues; pointers where TMA is usual."""
    for arch in MULTIPROCESSORS:
        for sizes in (LARGE, SMALL):
            yield _variant(arch, f"fp16 {sizes}", sizes)
        for sizes in (MIDDLE, FEW):
            yield _variant(arch, f"bf16 {sizes}", sizes, dtype=BRAIN, trans=(False, False))
        if arch in (89, 120):  # the kernels of 80
            continue
        for name, options in (EPILOGUES | ODD_ROWS if arch == 90 else EPILOGUES).items():
            yield _variant(arch, name, **options)
        if arch >= 90:
            yield _variant(arch, "pointers", MIDDLE, has_tma=False)


def variants() -> list[Variant]:
    return [*list_variants(), *gemm_variants()]
