"""The cases by which the kernels of a family are compared with amp_ext.reference.

An op on lists has the example in amp_ext/testing.py and, where that is not enough, cases here. They
reach each path of a kernel: dtypes, alignments, what is left over beside chunks, packs and tiles,
long lists, infinities and NaNs at the edges, layouts, epilogues, splits of k. Numbers are such that
whatever the order of summation, every kernel returns the reference's bits; only GELU has a
tolerance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext import testing
from amp_ext._library import _C
from amp_ext.ops import LIST_OPS

CHUNK = 16384  # elements, of the kernels of list ops
INF, NAN = float("inf"), float("nan")
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (FP32, FP16, BF16, FP64)

Calls = Iterator[tuple[Any, ...]]  # Case.what, .arguments and, where that is not 0, .parts


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        what: is special about it.
        op: its name in amp_ext.ops and amp_ext.reference.
        arguments: of the call, on the CPU.
        parts: where not 0, each list holds one tensor, which the op is given in parts of this size.
        tolerance: relative to numbers above 1, absolute below.
        plans: arguments of _C.force_gemm_tile, for a call with each.
    """

    what: str
    op: str
    arguments: dict[str, Any]
    parts: int = 0
    tolerance: float = 0.0
    plans: tuple[tuple[Any, ...], ...] = ()


def cases(family: str, backend: str) -> Iterator[Case]:
    """The cases of a family.

    Args:
        family: one of FAMILIES.
        backend: with "cuda" products are computed with each tile too; with "triton", which takes
            seconds to compile each kind of product, by a few kinds.
    """
    if family.startswith("gemm"):
        *_, kernel, name = family.split("_")
        dtype = {"f16": FP16, "bf16": BF16}[name]
        yield from itertools.islice(_products(dtype), 0, None, 5 if backend == "triton" else 1)
        if backend == "cuda":
            yield from _tiles(dtype, kernel == "sm90")
    else:
        op = _LISTS[family]
        yield Case("the example", op, testing.arguments(op))
        for what, arguments, *parts in _OF_LISTS[op]() if op in _OF_LISTS else ():
            yield Case(what, op, arguments, *parts)


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


def _unscale() -> Calls:
    grads = _gradients(_numbers(CHUNK + 3))

    def call(grads: list[Tensor], inv_scale: float, **clip: Any) -> dict[str, Any]:
        scalars = {"found_inf": _tensor(0.0), "inv_scale": _tensor(inv_scale)}
        return {"grads": grads, **scalars, **clip}

    yield "a factor", call(grads, 0.3)
    yield "products beyond the dtype", call(grads, 16.0)
    yield "an infinity at the end", call(_with(-INF, grads, 3, CHUNK + 2), 0.3)
    yield "a NaN and a factor of 1", call(_with(NAN, grads, 7, 36), 1.0)
    for factor in (0.3, 1.0):
        clip = {"norm": _tensor(5.0), "max_norm": 2.0}
        yield f"a factor of {factor}, and clipping", call(grads, factor, **clip)
    yield "a norm that is not finite", call(grads, 0.3, norm=_tensor(INF), max_norm=2.0)
    yield "a long list", call([_numbers(7001).float()], 0.3), 5


def _check_finite() -> Calls:
    def call(grads: list[Tensor]) -> dict[str, Any]:
        return {"grads": grads, "found_inf": _tensor(0.0)}

    grads = _gradients(_numbers(CHUNK + 3))
    yield "finite gradients", call(grads)
    values = itertools.cycle((INF, NAN, -INF))
    for i, grad in enumerate(grads):
        for position in {0, CHUNK - 1, CHUNK, grad.numel() - 1}:
            if 0 <= position < grad.numel():
                value = next(values)
                what = f"{value} in element {position} of {grad.dtype}"
                yield what, call([_with(value, grads, i, position)[i]])
    long = _numbers(7001).float()
    long[7000] = INF
    yield "a long list", call([long]), 5


def _grad_norm() -> Calls:
    def call(grads: list[Tensor], norms: bool = False, **more: Any) -> dict[str, Any]:
        if norms:
            more["norms"] = torch.zeros(len(grads), dtype=FP32, device="cpu")
        return {"grads": grads, "found_inf": _tensor(0.0), **more}

    # FP32 holds the sum of 32 squares exactly.
    integers = functools.partial(_integers, limit=511)
    half = {"inv_scale": _tensor(0.5)}
    grads = _gradients(integers(CHUNK + 3))
    yield "the norm alone", call(grads)
    yield "a factor, and the norm of each", call(grads, norms=True, **half)
    yield "an infinity", call(_with(INF, grads, 3, CHUNK), norms=True, **half)
    yield "a NaN", call(_with(NAN, grads, 0, 0), **half)
    several = list(integers(2003).float().split(5))
    yield "several tensors to a block", call(several, norms=True)
    yield "a norm beyond FP32", call([torch.full((5,), 3e38, dtype=FP32, device="cpu")])
    yield "a long list", call([integers(7001).float()], **half), 5


def _cast() -> Calls:
    pairs = list(itertools.product(DTYPES, repeat=2))
    for what, size, shift in (("the same alignments", CHUNK + 37, 0), ("other alignments", 150, 1)):
        numbers = _numbers(size)
        numbers[6:11] = _tensor((INF, -INF, NAN, 65520.0, 3.4e38), FP64)
        numbers[11 : size // 2] = _integers(size)[11 : size // 2]
        outputs = [torch.zeros(size, dtype=to, device="cpu") for to, _ in pairs]
        inputs = [numbers.to(dtype) for _, dtype in pairs]
        yield what, {"outputs": _placed(outputs), "inputs": _placed(inputs, shift)}
    long = _numbers(7001).float()
    yield "a long list", {"outputs": [long.half()], "inputs": [long * 3]}, 5


def _updated(op: str) -> Calls:
    """Of FP32 and of each other dtype, at other alignments too, in a long list, and skipped."""
    momentum = {"momentum": 0.9, "dampening": 0.25, "nesterov": False}
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": False}
    options = {"lr": 0.125, "weight_decay": 0.01, **(betas if op == "adam_" else momentum)}

    def numbers(size: int, seed: int) -> Tensor:
        return _integers(size + seed)[seed:] / 2048

    def call(sizes: list[int], dtypes: Any, shift: int = 0, **more: Any) -> dict[str, Any]:
        param, grad, first, second = dtypes

        def listed(dtype: torch.dtype, seed: int, shift: int = 0) -> list[Tensor]:
            return _placed([numbers(size, seed).to(dtype) for size in sizes], shift)

        steps = [_tensor(float(i % 7)) for i in range(len(sizes))]
        lists = {"params": listed(param, 1, shift), "grads": listed(grad, 2, 2 * shift)}
        if op == "adam_":
            squares = [x.square_() for x in listed(second, 4, shift)]
            lists |= {"exp_avgs": listed(first, 3), "exp_avg_sqs": squares}
        else:
            lists |= {"momentum_buffers": listed(first, 3)}
        if param == FP32:
            lists |= {"copies": listed((FP16, BF16)[shift], 5)}
        return {**lists, "steps": steps, **options, **more}

    sizes = [CHUNK + 3, 37, 0, 4]
    yield "FP32", call(sizes, (FP32,) * 4)
    kinds = itertools.product((FP32, FP16, BF16), repeat=2)
    for i, (dtype, grad_dtype) in enumerate(kinds):
        state = (DTYPES[i % 3], DTYPES[(i + 1) % 3])
        more = {"stochastic_rounding": i % 2 == 0, "inv_scale": _tensor(0.5)}
        what = f"{dtype} by {grad_dtype}, {state[0]} and {state[1]}"
        yield what, call(sizes, (dtype, grad_dtype, *state), i % 2, **more)
    if op == "sgd_":
        plain = call(sizes, (FP32,) * 4, momentum=0.0, dampening=0.0)
        yield "without momentum", {**plain, "momentum_buffers": None, "steps": None}
        yield "Nesterov's", call(sizes, (FP32,) * 4, nesterov=True, dampening=0.0)
    yield "a long list", call([i % 5 for i in range(450)], (FP32,) * 4)
    for value in (1.0, NAN):
        skipped = {"found_inf": _tensor(value), "norm": _tensor(2.0), "max_norm": 1.0}
        yield f"an overflow, {value}", call(sizes, (FP32,) * 4, **skipped)
    bad = {"found_inf": _tensor(0.0), "norm": _tensor(INF)}
    yield "a norm that is not finite", call(sizes, (FP32,) * 4, **bad)


def _update_scale() -> Calls:
    def call(*found_infs: float, **changes: Any) -> dict[str, Any]:
        arguments = {
            "scale": _tensor(1024.0),
            "growth_tracker": _tensor(1, torch.int32),
            "found_infs": [_tensor(found_inf) for found_inf in found_infs],
            "growth_factor": 2.1,
            "backoff_factor": 0.3,
            "growth_interval": 2,
            "skipped_steps": _tensor(5, torch.int64),
        }
        return {**arguments, **changes}

    def patient(left: int) -> dict[str, Any]:
        return {"hysteresis": 2, "hysteresis_tracker": _tensor(left, torch.int32)}

    yield "no overflow", call(0.0, growth_interval=3)
    yield "growth", call(0.0, 0.0)
    yield "growth up to the ceiling", call(0.0, max_scale=1500.0)
    yield "growth beyond FP32", call(0.0, scale=_tensor(3e38))
    yield "an overflow", call(0.0, 1.0)
    yield "an overflow in the last of many", call(*(0.0,) * 39, 1.0)
    yield "an overflow above the floor", call(1.0, min_scale=1000.0)
    yield "an overflow at the floor", call(1.0, scale=_tensor(2.0**-126))
    yield "a tolerated overflow", call(1.0, **patient(2))
    yield "a backoff, tolerance used up", call(1.0, **patient(1))
    yield "no overflow, tolerance restored", call(0.0, **patient(1))
    next_step = {"next_step": _tensor([0.0, 1.0, 0.0])}
    yield "growth, and the next step", call(0.0, **next_step, scale=_tensor(3.0))


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
        operands = _operands(136, 264, 72, dtype, trans_a, trans_b)
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
    for activation in ("gelu", "gelu_tanh", "silu"):
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
    """Products of several tiles, by each tile of a kernel."""
    count = _C.gemm_tile_count(sm90=sm90)
    clusters = itertools.cycle(((1, 1), (2, 1), (1, 2)) if sm90 else ((1, 1),))
    cuts = itertools.cycle(((1, 0), (2, 0), (0, 3), (1, 2)) if sm90 else ((1, 0), (2, 0)))
    plans = [
        (i, cluster, splits, sm90, ranges)
        for i, cluster, (splits, ranges) in zip(range(count), clusters, cuts, strict=False)
    ]
    for trans_a, trans_b in TRANSPOSES:
        operands = _operands(264, 264, 136, dtype, trans_a, trans_b)
        what = f"each tile, layout {'NT'[trans_a]}{'NT'[trans_b]}"
        arguments = {**operands, "out_dtype": FP32}
        yield Case(what, "gemm", arguments, plans=tuple(plans))
        more = {"bias": _integers(264, limit=9).float(), "activation": "relu"}
        yield Case(f"{what}, epilogue", "gemm_with_aux", {**operands, **more}, plans=tuple(plans))
    if sm90:
        # Steps go round each ring of buffers; blocks have several tiles each, of the smallest size.
        plans = [(i, (1, 1), 1, True) for i in range(count)]
        arguments = {**_operands(72, 72, 1096, dtype, False, True), "out_dtype": FP32}
        yield Case("many steps", "gemm", arguments, plans=tuple(plans))
        arguments = {**_operands(1608, 1544, 40, dtype, False, True), "out_dtype": FP32}
        yield Case("many tiles", "gemm", arguments, plans=tuple(plans[-1:]))


_LISTS = {op.removesuffix("_"): op for op in LIST_OPS}
_OF_LISTS = {
    "unscale_": _unscale,
    "check_finite": _check_finite,
    "grad_norm": _grad_norm,
    "cast_": _cast,
    "update_scale_": _update_scale,
    "adam_": functools.partial(_updated, "adam_"),
    "sgd_": functools.partial(_updated, "sgd_"),
}
PRODUCTS = ("gemm_f16", "gemm_bf16")
"""Of a backend that has not several kernels for them."""
FAMILIES = (
    *_LISTS,
    *PRODUCTS,
    *("gemm_sm80_f16", "gemm_sm80_bf16", "gemm_sm90_f16", "gemm_sm90_bf16"),
)
