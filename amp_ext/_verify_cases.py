"""The cases by which the kernels of a family are compared with amp_ext.reference.

They reach each path of a kernel: dtypes, alignments, what is left over beside chunks, packs and
tiles, long lists, infinities and NaNs at the edges, layouts, epilogues, splits of k. Numbers are
such that whatever the order of summation, every kernel returns the reference's bits; only GELU has
a tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext._library import _C

CHUNK = 16384  # elements, of the kernels of list ops
INF, NAN = float("inf"), float("nan")
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (FP32, FP16, BF16, FP64)


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        what: is special about it.
        op: its name in amp_ext.ops and amp_ext.reference.
        arguments: of the call, on the CPU.
        tolerance: beside numbers up to 1; relative to larger ones.
        plans: arguments of _C.force_gemm_tile, for a call with each.
    """

    what: str
    op: str
    arguments: dict[str, Any]
    tolerance: float = 0.0
    plans: tuple[tuple[Any, ...], ...] = ()


class Parts(NamedTuple):
    """A long list of short tensors, side by side; for the reference one long tensor."""

    whole: Tensor

    def tensors(self) -> list[Tensor]:
        return list(self.whole.split(5))


def cases(family: str, backend: str, sm90: bool) -> Iterator[Case]:
    """The cases of a family.

    Args:
        family: a key of FAMILIES.
        backend: with "cuda" products are computed with each tile too; with "triton", which takes
            seconds to compile each kind of product, by a few kinds.
        sm90: whether the kernels for sm_90a run on the device.
    """
    products = family.startswith("gemm")
    all_of_them = FAMILIES[family]()
    yield from itertools.islice(all_of_them, 0, None, 5 if products and backend == "triton" else 1)
    if products and backend == "cuda":
        yield from _tiles(FP16 if family == "gemm_f16" else BF16, sm90)


# ---- lists -------------------------------------------------------------------------------------


def _integers(*shape: int, limit: int = 8191) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))  # other numbers for other shapes
    kind = {"generator": generator, "dtype": FP64, "device": "cpu"}
    return torch.randint(-limit, limit + 1, shape, **kind)


def _tensor(value: Any, dtype: torch.dtype = FP32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def _numbers(count: int) -> Tensor:
    """From 2**-30 to 2**15, all with 13 bits; and some subnormal ones."""
    numbers = _integers(count) * (_integers(count) % 33 - 30).exp2()
    if count > 6:
        numbers[1:6] = _tensor((-0.0, 1e-40, -3e-41, 1e-310, 6e-8), FP64)
    return numbers


def _placed(values: list[Tensor], shift: int = 0) -> list[Tensor]:
    """Copies in one piece of memory, 0 to 3 elements behind multiples of 16 bytes."""
    ends = [0]
    starts = []
    for i, value in enumerate(values):
        starts.append(-(-ends[-1] // 16) * 16 + 16 + (i + shift) % 4 * value.itemsize)
        ends.append(starts[-1] + value.nbytes)
    memory = torch.full((ends[-1] + 16,), 42, dtype=torch.uint8, device="cpu")
    placed = []
    for start, value in zip(starts, values, strict=True):
        placed.append(memory[start : start + value.nbytes].view(value.dtype).copy_(value))
    return placed


def _gradients(numbers: Tensor) -> list[Tensor]:
    sizes = (CHUNK + 3, 37, 0)
    return _placed([numbers[:size].to(dtype) for dtype in DTYPES for size in sizes])


def _with(value: float, grads: list[Tensor], index: int, position: int) -> list[Tensor]:
    """Copies of gradients, in one of which an element is this value."""
    copies = _placed(grads)
    copies[index][position] = value
    return copies


def _unscale() -> Iterator[Case]:
    grads = _gradients(_numbers(CHUNK + 3))

    def case(what: str, grads: Any, inv_scale: float, **clip: Any) -> Case:
        scalars = {"found_inf": _tensor(0.0), "inv_scale": _tensor(inv_scale), **clip}
        return Case(what, "unscale_", {"grads": grads, **scalars})

    yield case("a factor", grads, 0.3)
    yield case("a factor of 1", grads, 1.0)
    yield case("products beyond the dtype", grads, 16.0)
    yield case("an infinity at the end", _with(-INF, grads, 3, CHUNK + 2), 0.3)
    yield case("a NaN and a factor of 1", _with(NAN, grads, 7, 36), 1.0)
    for factor in (0.3, 1.0):
        what = f"a factor of {factor}, and clipping"
        yield case(what, grads, factor, norm=_tensor(5.0), max_norm=2.0)
    yield case("a norm that is not finite", grads, 0.3, norm=_tensor(INF), max_norm=2.0)
    yield case("a long list", Parts(_numbers(7001).float()), 0.3)


def _check_finite() -> Iterator[Case]:
    def case(what: str, grads: Any) -> Case:
        return Case(what, "check_finite", {"grads": grads, "found_inf": _tensor(0.0)})

    grads = _gradients(_numbers(CHUNK + 3))
    yield case("finite gradients", grads)
    values = itertools.cycle((INF, NAN, -INF))
    for i, grad in enumerate(grads):
        for position in {0, CHUNK - 1, CHUNK, grad.numel() - 1}:
            if 0 <= position < grad.numel():
                value = next(values)
                what = f"{value} in element {position} of {grad.dtype}"
                yield case(what, _with(value, grads, i, position))
    long = _numbers(7001)
    long[7000] = INF
    yield case("a long list", Parts(long.float()))


def _grad_norm() -> Iterator[Case]:
    def case(what: str, grads: Any, **more: Any) -> Case:
        return Case(what, "grad_norm", {"grads": grads, "found_inf": _tensor(0.0), **more})

    def norms(count: int) -> Tensor:
        return torch.zeros(count, dtype=FP32, device="cpu")

    half = _tensor(0.5)
    grads = _gradients(_integers(CHUNK + 3))
    yield case("the norm alone", grads)
    yield case("a factor, and the norm of each", grads, inv_scale=half, norms=norms(len(grads)))
    yield case("an infinity", _with(INF, grads, 3, CHUNK), inv_scale=half, norms=norms(len(grads)))
    yield case("a NaN", _with(NAN, grads, 0, 0), inv_scale=half)
    several = list(_integers(2003).float().split(5))
    yield case("several tensors to a block", several, norms=norms(len(several)))
    yield case("a long list", Parts(_integers(7001).float()), inv_scale=half)


def _cast() -> Iterator[Case]:
    pairs = list(itertools.product(DTYPES, repeat=2))

    def case(what: str, size: int, shift: int) -> Case:
        numbers = _numbers(size)
        numbers[6:11] = _tensor((INF, -INF, NAN, 65520.0, 3.4e38), FP64)
        numbers[11 : size // 2] = _integers(size)[11 : size // 2]
        outputs = [torch.zeros(size, dtype=to, device="cpu") for to, _ in pairs]
        inputs = [numbers.to(dtype) for _, dtype in pairs]
        arguments = {"outputs": _placed(outputs), "inputs": _placed(inputs, shift)}
        return Case(what, "cast_", arguments)

    yield case("the same alignments", CHUNK + 37, shift=0)
    yield case("other alignments", 150, shift=1)
    long = _numbers(7001).float()
    yield Case("a long list", "cast_", {"outputs": Parts(long.half()), "inputs": Parts(long * 3)})


def _update_scale() -> Iterator[Case]:
    def case(what: str, found_infs: tuple[float, ...], **changes: Any) -> Case:
        arguments = {
            "scale": _tensor(1024.0),
            "growth_tracker": _tensor(1, torch.int32),
            "found_infs": [_tensor(found_inf) for found_inf in found_infs],
            "growth_factor": 2.1,
            "backoff_factor": 0.3,
            "growth_interval": 2000,
            "skipped_steps": _tensor(5, torch.int64),
        }
        return Case(what, "update_scale_", {**arguments, **changes})

    def patient(left: int) -> dict[str, Any]:
        return {"hysteresis": 2, "hysteresis_tracker": _tensor(left, torch.int32)}

    grow = {"growth_interval": 2}
    yield case("no overflow", (0.0,))
    yield case("growth", (0.0, 0.0), **grow)
    yield case("growth up to the ceiling", (0.0,), max_scale=1500.0, **grow)
    yield case("growth beyond FP32", (0.0,), scale=_tensor(3e38), **grow)
    yield case("an overflow", (0.0, 1.0))
    yield case("an overflow in the last of many", (0.0,) * 39 + (1.0,))
    yield case("an overflow above the floor", (1.0,), min_scale=1000.0)
    yield case("an overflow at the floor", (1.0,), scale=_tensor(2.0**-126))
    yield case("a tolerated overflow", (1.0,), **patient(2))
    yield case("one overflow too many", (1.0,), **patient(1))
    yield case("no overflow, tolerance restored", (0.0,), **patient(1))


# ---- products ----------------------------------------------------------------------------------


def _operands(
    m: int, n: int, k: int, dtype: torch.dtype, trans_a: bool, trans_b: bool, skip: int = 0
) -> dict[str, Any]:
    """Small integers: each sum of up to 2**20 products is a number of FP32."""

    def matrix(*shape: int) -> Tensor:
        memory = torch.zeros(shape[0] * shape[1] + skip, dtype=dtype, device="cpu")
        return memory[skip:].view(shape).copy_(_integers(*shape, limit=4))

    a = matrix(k, m) if trans_a else matrix(m, k)
    b = matrix(n, k) if trans_b else matrix(k, n)
    return {"a": a, "b": b, "trans_a": trans_a, "trans_b": trans_b}


TRANSPOSES = list(itertools.product((False, True), repeat=2))


def _products(dtype: torch.dtype) -> Iterator[Case]:
    for trans_a, trans_b in TRANSPOSES:
        layout = f"{'NT'[trans_a]}{'NT'[trans_b]}"
        operands = _operands(130, 136, 72, dtype, trans_a, trans_b)
        yield Case(f"layout {layout}", "gemm", {**operands, "out_dtype": FP32})
        operands = _operands(67, 45, 35, dtype, trans_a, trans_b, skip=1)
        yield Case(f"layout {layout}, unaligned", "gemm", {**operands, "out_dtype": FP32})
        operands = _operands(16, 24, 2056, dtype, trans_a, trans_b)
        yield Case(f"layout {layout}, a long sum", "gemm", {**operands, "out_dtype": FP32})

    operands = _operands(70, 72, 136, dtype, False, True)
    addend, bias = _integers(70, 72, limit=9), _integers(72, limit=9)
    for out in (FP32, FP16, BF16):
        more = {"c": addend.to(out), "alpha": 0.5, "beta": 2.0, "bias": bias.to(out)}
        arguments = {**operands, **more, "activation": "relu", "out_dtype": out}
        yield Case(f"epilogue into {out}", "gemm_with_aux", arguments)
        arguments = {**operands, "aux": addend.to(out), "activation": "relu", "out_dtype": out}
        yield Case(f"derivative into {out}", "gemm_times_derivative", arguments)
    for activation in ("gelu", "gelu_tanh"):
        small = {**operands, "a": operands["a"] / 32, "activation": activation, "out_dtype": FP32}
        arguments = {**small, "bias": bias.float()}
        yield Case(activation, "gemm_with_aux", arguments, tolerance=1e-5)
        arguments = {**small, "aux": (addend / 4).float()}
        yield Case(activation, "gemm_times_derivative", arguments, tolerance=1e-4)

    c = torch.full((70, 80), 3.0, dtype=FP32, device="cpu")[:, :72]
    yield Case("added in memory", "gemm_accumulate_", {**operands, "c": c})
    a, b = (_integers(3, rows, 40, limit=4).to(dtype) for rows in (33, 24))
    batch = {"a": a, "b": b, "trans_b": True, "out_dtype": FP32}
    yield Case("a batch", "gemm", batch)
    yield Case("the sum of a batch", "gemm", {**batch, "sum_batch": True})
    spoiled = a.clone()
    spoiled[1, 32, 39], spoiled[2, 0, 0] = NAN, INF
    yield Case("infinities and NaNs", "gemm", {**batch, "a": spoiled, "activation": "relu"})


def _tiles(dtype: torch.dtype, sm90: bool) -> Iterator[Case]:
    """Products of several tiles, by each tile."""
    tiles = _C.gemm_tiles()
    plans = [(i, (1, 1), 1 + i % 2, False) for i in range(len(tiles["gemm_kernel"]))]
    if sm90:
        clusters = itertools.cycle(((1, 1), (2, 1), (1, 2)))
        count = len(tiles["gemm_sm90_kernel"])
        plans += [(i, next(clusters), 1 + i % 2, True) for i in range(count)]
    for trans_a, trans_b in TRANSPOSES:
        operands = _operands(260, 264, 136, dtype, trans_a, trans_b)
        what = f"each tile, layout {'NT'[trans_a]}{'NT'[trans_b]}"
        arguments = {**operands, "out_dtype": FP32}
        yield Case(what, "gemm", arguments, plans=tuple(plans))
        more = {"bias": _integers(264, limit=9).float(), "activation": "relu"}
        yield Case(f"{what}, epilogue", "gemm_with_aux", {**operands, **more}, plans=tuple(plans))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "unscale": _unscale,
    "check_finite": _check_finite,
    "grad_norm": _grad_norm,
    "cast": _cast,
    "update_scale": _update_scale,
    "gemm_f16": partial(_products, FP16),
    "gemm_bf16": partial(_products, BF16),
}
