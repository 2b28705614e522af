"""Drive each CUDA kernel by small calls of ops, with the oracle's results to compare with.

They are few and fast: a mutant of a kernel runs the shortest ones that execute its statement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import reference
from amp_ext import _C, ops
from cudasim.mutants import Case

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Arguments = tuple[list[Any], dict[str, Any]]
INF, NAN = float("inf"), float("nan")


# ---- calls and comparisons ----------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(x, change) for x in value)
    if isinstance(value, dict):
        return {name: mapped(x, change) for name, x in value.items()}
    return value


def whole(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor, as one of a dimension."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def moved(tensor: Tensor, device: str) -> Tensor:
    """Return a copy of a tensor and of the memory around it."""
    copy = whole(tensor).to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, lambda t: found.append(t) or t)
    return found


def assert_same(actual: Tensor, expected: Tensor, loose: float = 0.0, least: float = 1.0) -> None:
    """Compare bit for bit, except for the bits of a NaN; if loose, compare with an error."""
    actual = actual.cpu()
    if loose:
        error = (actual.double() - expected.double()).abs()
        good = error <= loose * (least + expected.double().abs())
        good |= (actual == expected) | (actual.isnan() & expected.isnan())
    else:
        good = (actual == expected) & (actual.signbit() == expected.signbit())
        good |= actual.isnan() & expected.isnan()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert good.all(), f"{int((~good).sum())} of {good.numel()} elements are wrong"


class Call:
    """A call of an op that must write and return the oracle's results."""

    def __init__(self, op: str, arguments: Arguments, loose: float, prepare: Callable[[], None]):
        self.op, self.arguments, self.loose, self.prepare = op, arguments, loose, prepare
        self.expected = mapped(arguments, lambda t: moved(t, "cpu"))
        self.returned = getattr(reference, op)(*self.expected[0], **self.expected[1])

    def __call__(self) -> None:
        self.prepare()
        given, options = mapped(self.arguments, lambda t: moved(t, "cuda"))
        returned = getattr(ops, self.op)(*given, **options)
        torch.cuda.synchronize()
        for actual, expected in zip(tensors(returned), tensors(self.returned), strict=True):
            assert_same(actual, expected, self.loose, float(self.op != "grad_norm"))
        written = zip(tensors((given, options)), tensors(self.expected), strict=True)
        for actual, expected in written:
            assert_same(whole(actual), whole(expected), self.loose)


def case(
    name: str,
    op: str,
    *given: Any,
    loose: float = 0.0,
    prepare: Callable[[], None] = lambda: None,
    **options: Any,
) -> Case:
    return Case(f"{op} {name}", Call(op, (list(given), options), loose, prepare))


# ---- lists --------------------------------------------------------------------------------------

SIZES = (1, 5, 47, 2051)


def placed(values: Tensor, offset: int, around: float = NAN) -> Tensor:
    """Return a copy `offset` elements into its storage, with other elements behind it.

    A block of threads takes as many elements at a time as there are others.
    """
    count = values.numel() + offset + 512 * 16 // values.itemsize
    memory = torch.full((count,), around, dtype=values.dtype)
    return memory[offset : offset + values.numel()].view_as(values).copy_(values)


def numbers(
    dtype: torch.dtype, sizes: Sequence[int] = SIZES, offset: int = 0, around: float = NAN
) -> list[Tensor]:
    return [placed((torch.randn(n) * 100).to(dtype), offset, around) for n in sizes]


def norms(grads: Sequence[Any]) -> Tensor:
    return torch.full((len(grads),), NAN)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=F32)


def of_lists() -> Iterator[Case]:
    for dtype, offset in [(F16, 0), (BF16, 1), (F32, 0), (F32, 3), (F64, 1)]:
        name = f"{str(dtype)[6:]} from {offset}"
        grads = partial(numbers, dtype, offset=offset)
        yield case(name, "unscale_", grads(), scalar(0), scalar(0.0123))
        yield case(f"{name}, by 1", "unscale_", grads(), scalar(0), scalar(1))
        yield case(name, "check_finite", grads(), scalar(0))
        loose = 1e-6
        turn = 512 * 16 // dtype.itemsize
        for count in (3, 4, 8):
            text, turns = f"{name}, {count} turns", numbers(dtype, (count * turn + 7, 5), offset)
            yield case(text, "unscale_", turns, scalar(0), scalar(0.0123))
            yield case(f"{text} by 1", "unscale_", turns, scalar(0), scalar(1))
            yield case(text, "check_finite", turns, scalar(0))
            yield case(text, "grad_norm", turns, scalar(0), loose=loose)
            each_norm = {"norms": norms(turns), "loose": loose}
            yield case(f"{text}, of each", "grad_norm", turns, scalar(0), **each_norm)
        yield case(name, "grad_norm", grads(), scalar(0), scalar(0.0123), loose=loose)
        each_norm = {"norms": norms(SIZES), "loose": loose}
        yield case(f"{name}, of each", "grad_norm", grads(), scalar(0), **each_norm)
    for dtype, other in itertools.product((F16, BF16, F32, F64), repeat=2):
        aligned, unlike = ((0, 0), (1, 1)), ((1, 3), (0, 4), (1, 0), (0, 1), (0, 3), (0, 7))
        for offset, place in (*aligned, *unlike):
            text = f"{str(dtype)[6:]} from {offset} to {str(other)[6:]} from {place}"
            out = numbers(other, offset=place, around=7.0)
            yield case(text, "cast_", out, numbers(dtype, offset=offset))
    subnormal = [x * 1e-7 for x in numbers(BF16)]
    yield case("to subnormal float16", "cast_", numbers(F16, around=7.0), subnormal)
    for dtype, offset in itertools.product((F16, BF16, F32, F64), (0, 1)):
        name = f"of bad {str(dtype)[6:]} from {offset}"
        yield each(f"{name}", "check_finite", bad_lists(dtype, offset))
        yield each(f"{name}", "unscale_", bad_lists(dtype, offset), scalar(0.0123))
        yield each(f"{name}, by 1", "unscale_", bad_lists(dtype, offset), scalar(1))
        few = itertools.islice(bad_lists(dtype, offset), 18)
        yield each(f"{name}", "grad_norm", few, scalar(0.0123))
    for dtype, norm in itertools.product((F16, BF16, F32, F64), (3.0, 0.25, INF)):
        grads, name = numbers(dtype), f"{str(dtype)[6:]} clipped by {norm}"
        clip = {"norm": scalar(norm), "max_norm": 1.0}
        yield case(name, "unscale_", grads, scalar(0), scalar(0.5), **clip)
        yield case(f"{name}, 1", "unscale_", grads, scalar(0), scalar(1.0), **clip)
    bad = numbers(F16, (70_000, 3, 40_000))
    bad[0][0] = bad[-1][-1] = INF
    yield case("large, bad at both ends", "unscale_", bad, scalar(0), scalar(0.0123))
    yield case("large, bad at both ends", "check_finite", bad, scalar(0))
    large = numbers(F16, (70_000, 3, 40_000))
    yield case("large", "unscale_", large, scalar(0), scalar(0.0123))
    yield case("large", "grad_norm", large, scalar(0), loose=1e-6)
    yield case("of each", "grad_norm", large, scalar(0), norms=norms(large), loose=1e-6)
    behind = numbers(F32, (16389,))  # the second block has one piece of it
    yield case(
        "of a share's first piece", "grad_norm", behind, scalar(0), norms=norms(behind), loose=1e-6
    )
    many = numbers(F32, [i % 5 for i in range(300)])
    yield case("many", "unscale_", many, scalar(0), scalar(0.0123))
    yield case("many", "grad_norm", many, scalar(0), scalar(0.5), loose=1e-6)
    factors = [(F32, 1e22), (BF16, 1e22), (F16, 600.0)]
    for dtype, factor in [*itertools.product((F32, BF16), (1e-22, 1e-24, 1e-26)), *factors]:
        extreme = [x * factor for x in numbers(dtype, (5, 2051, 16391))]
        name = f"of {factor} {str(dtype)[6:]}"
        yield case(name, "grad_norm", extreme, scalar(0), loose=1e-6)
        each_norm = {"norms": norms(extreme), "loose": 1e-6}
        yield case(f"{name}, of each", "grad_norm", extreme, scalar(0), **each_norm)
    for dtype in (F16, BF16, F32):
        name, sizes = str(dtype)[6:], (5, 2051, 16391)
        small = numbers(dtype, sizes)
        yield case(f"{name} times 1e-23", "grad_norm", small, scalar(0), scalar(1e-23), loose=1e-6)
        factor = scalar(1e-20 if dtype == F16 else 1)
        for each_norm in ({}, {"norms": norms(small)}):
            least = [least_numbers(dtype, size) for size in sizes]
            text = f"least {name}{', of each' * bool(each_norm)}"
            yield case(text, "grad_norm", least, scalar(0), factor, loose=1e-6, **each_norm)
    many = [x.clone() for x in many]
    many[-1][-1] = INF
    yield case("many, one bad", "unscale_", many, scalar(0), scalar(0.0123))
    yield case("many, one bad", "check_finite", many, scalar(0))
    yield from of_scales()


def least_numbers(dtype: torch.dtype, size: int) -> Tensor:
    """Return the least number that is not 0 in every second place, and zeros."""
    numbers, info = torch.zeros(size, dtype=dtype), torch.finfo(dtype)
    numbers[::2] = info.smallest_normal * info.eps
    return numbers


def bad_lists(dtype: torch.dtype, offset: int) -> Iterator[list[Tensor]]:
    """Yield lists with one element that is not finite: of each unit of 16 bytes that a thread takes
    in turn, alone and four at a time, and all of a short tensor."""
    unit = 16 // dtype.itemsize
    turn = 512 * unit
    found = [(18, i) for i in range(18)]
    for turns, j in itertools.product((1, 2, 3), range(unit)):
        found += [(turns * turn + 7, i * turn + 5 * unit + j) for i in range(turns)]
    for i, j in itertools.product(range(4), range(unit)):
        found.append((4 * turn + 3, i * turn + 5 * unit + j))
    for i, (size, position) in enumerate(found):
        lists = numbers(dtype, (3, size), offset)
        lists[1][position] = (INF, -INF, NAN)[i % 3]
        yield lists[:: (-1) ** i]


def each(name: str, op: str, lists: Iterator[list[Tensor]], *given: Any) -> Case:
    """Return a case of a call for each list, with found_inf behind it."""
    calls = [case(name, op, grads, scalar(0), *given).run for grads in lists]
    return Case(f"{op} {name}", lambda: [call() for call in calls])


def of_scales() -> Iterator[Case]:
    states = itertools.product((0, 1), (0, 3), (1, 2))
    for found, tracker, hysteresis in states:
        more: dict[str, Any] = {"min_scale": 2.0, "max_scale": 5000.0, "hysteresis": hysteresis}
        more["skipped_steps"] = torch.tensor(5)
        if hysteresis > 1:
            more["hysteresis_tracker"] = torch.tensor(found + 1, dtype=torch.int32)
        given = [scalar(4096), torch.tensor(tracker, dtype=torch.int32), [scalar(0), scalar(found)]]
        name = f"found {found}, {tracker} steps, hysteresis {hysteresis}"
        yield case(name, "update_scale_", *given, 2.0, 0.5, 4, **more)
    for scale in (3e38, -3e38):
        given = [scalar(scale), torch.tensor(3, dtype=torch.int32), [scalar(0)]]
        yield case(f"at most, {scale}", "update_scale_", *given, 2.0, 0.5, 4)
    founds = [scalar(float(i == 19)) for i in range(20)]
    given = [scalar(8), torch.tensor(3, dtype=torch.int32), founds]
    yield case("of many", "update_scale_", *given, 2.0, 0.5, 4)


# ---- optimizers ---------------------------------------------------------------------------------

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
ADAMW, NAG = {"decoupled": True}, {"nesterov": True, "dampening": 0.0}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}


def state(
    op: str,
    sizes: Sequence[int],
    kinds: Sequence[torch.dtype],
    offset: int = 0,
    only: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Return the arguments of an update.

    Args:
        op: adam_ or sgd_.
        sizes: of the parameters.
        kinds: of parameter, gradient and moments.
        offset: where tensors begin in their storage.
        only: the only argument with tensors that begin there.
        more: other arguments; amsgrad; whether parameters are copied.
    """
    dtype, grad, first, second = kinds

    def values(name: str, kind: torch.dtype, square: bool = False) -> list[Tensor]:
        made = [torch.randn(n) for n in sizes]
        at = offset if only in ("", name) else 0
        return [placed((x * x if square else x).to(kind), at) for x in made]

    found = {"params": values("params", dtype), "grads": values("grads", grad)}
    if op == "adam_":
        found["exp_avgs"] = values("exp_avgs", first)
        found |= {"exp_avg_sqs": values("exp_avg_sqs", second, True), **ADAM}
        if more.pop("amsgrad", False):
            found["max_exp_avg_sqs"] = values("max_exp_avg_sqs", second, True)
    else:
        found |= {"momentum_buffers": values("momentum_buffers", first), **SGD}
    if more.pop("copied", False):
        found["copies"] = values("copies", F16)
    found["steps"] = [scalar(6.0 * (i % 4 in (1, 2))) for i in range(len(sizes))]
    return {**found, **more}


def of_optimizers() -> Iterator[Case]:
    plain, mixed = (F32, F32, F32, F32), (BF16, F16, BF16, F32)
    sizes = (19, 2, 1030, 64)
    chance = {"stochastic_rounding": True}
    scalars = {"found_inf": scalar(0), "inv_scale": scalar(0.3)}
    clip = {"norm": scalar(3.0), "max_norm": 1.0}
    for op, own in (
        ("adam_", {"decoupled": True}),
        ("adam_", {"decoupled": False, "amsgrad": True, "maximize": True}),
        ("sgd_", {"nesterov": False}),
        ("sgd_", {"nesterov": True, "maximize": True, "dampening": 0.0}),
    ):
        text = " ".join(name for name, value in own.items() if value)
        for kinds, offset in ((plain, 0), (plain, 1), (mixed, 0), (mixed, 3)):
            name = f"{text} {str(kinds[0])[6:]} from {offset}"
            yield case(name, op, **state(op, sizes, kinds, offset, copied=kinds == plain, **own))
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
        for name, offset in itertools.product(names, (1, 2)):
            given = state(op, sizes, plain, offset, name, **own)
            yield case(f"{text} with {name} from {offset}", op, **given)
        given = state(op, sizes, plain, 1, "copies", copied=True, **own)
        yield case(f"{text} with copies from 1", op, **given)
        for i in range(4):
            kinds = tuple(BF16 if i == j else F32 for j in range(4))
            yield case(f"{text} of kinds {i}", op, **state(op, (6203,), kinds, **own))
        yield case(f"{text} by chance", op, **state(op, sizes, (BF16,) * 4, **chance, **own))
        given = state(op, (70, 9), (BF16,) * 4, **chance, **own)
        for grad in given["grads"]:
            grad[::3] = INF
        yield case(f"{text} by chance, of infinities", op, **given)
        out_of_range = {"found_inf": scalar(0), "inv_scale": scalar(3e38), "norm": scalar(1e30)}
        given = state(op, range(3, 32, 4), plain, 1, **out_of_range, max_norm=1.0, **own)
        yield case(f"{text} scaled out of range", op, **given)
        yield case(f"{text} scaled", op, **state(op, sizes, plain, **scalars, **clip, **own))
        lr = {"tensor_lr": scalar(0.03)}
        yield case(f"{text} lr", op, **state(op, sizes, (F32, BF16, F32, F32), **lr, **own))
    for op, own in (("adam_", {"decoupled": True}), ("sgd_", {"nesterov": False})):
        for name, more in (
            ("skipped", {"found_inf": scalar(1)}),
            ("of a bad norm", {"found_inf": scalar(0), "norm": scalar(INF), "max_norm": 1.0}),
            ("of a bad norm alone", {"norm": scalar(INF), "max_norm": 1.0}),
        ):
            yield case(name, op, **state(op, sizes, plain, **own, **more))
        yield case("many", op, **state(op, [i % 4 for i in range(60)], plain, **own))
        yield case("large", op, **state(op, (70_000,) * 4, plain, **own))
        for copied in (False, True):
            kinds = (F32, *mixed[1:]) if copied else mixed  # fp32 parameters alone have copies
            given = state(op, (70_000, 9), kinds, copied=copied, **own)
            yield case(f"large, mixed{', copied' * copied}", op, **given)
        equal = {"steps": [scalar(6.0) for _ in sizes]}
        yield case("of equal steps", op, **{**state(op, sizes, plain, **own), **equal})
    yield case(
        "large, amsgrad", "adam_", **state("adam_", (70_000, 9), mixed, amsgrad=True, **ADAMW)
    )
    yield case("large, copied", "adam_", **state("adam_", (70_000, 9), plain, copied=True, **ADAMW))
    given = state("adam_", (120_000, 9, 90_000), (BF16,) * 4, amsgrad=True, **chance, **ADAMW)
    yield case("large, by chance", "adam_", **given)
    given = state("sgd_", (120_000, 9, 90_000), (BF16,) * 4, **chance, **NAG)
    yield case("large, by chance", "sgd_", **given)
    yield case("large, copied", "sgd_", **state("sgd_", (70_000, 9), plain, copied=True, **NAG))


# ---- products -----------------------------------------------------------------------------------


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def by(rows: bool, x: Tensor) -> Tensor:
    """Return a matrix that lies by rows, or by columns."""
    return x if rows else x.mT.contiguous().mT


def framed(x: Tensor) -> Tensor:
    """Return a copy of matrices with NaN behind each line, and behind the last line."""
    *batch, rows, columns = x.shape
    memory = torch.full((*batch, rows + 8, columns + 8), NAN, dtype=x.dtype)
    return memory[..., :rows, :columns].copy_(x)


def of_products(
    sm90: bool, tile: int, size: tuple[int, int], layouts: Sequence[tuple[bool, bool]]
) -> Iterator[Case]:
    """Yield products of one tile: layouts, results, epilogues, shares of k."""
    m, n = size
    name = f"tile {tile}"

    def forced(**plan: Any) -> Callable[[], None]:
        return lambda: _C.force_gemm_tile(tile, sm90=sm90, **plan)

    def operands(
        dtype: torch.dtype, k: int = 136, layout: int = 0, batch: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        rows_a, rows_b = layouts[layout % len(layouts)]
        a, b = integers(*batch, m, k, dtype=dtype), integers(*batch, k, n, dtype=dtype)
        return (
            framed(a) if rows_a else framed(a.mT).mT,
            framed(b) if rows_b else framed(b.mT).mT,
        )

    for i, dtype in itertools.product(range(len(layouts)), (F16, BF16)):
        out = (F32, dtype)[i % 2]
        text = f"{name} of layout {layouts[i]} {str(dtype)[6:]} to {str(out)[6:]}"
        yield case(text, "gemm", *operands(dtype, 136, i), out_dtype=out, prepare=forced())
        text, shares = f"{text} of a batch in 4 shares", operands(dtype, 136, i, (2,))
        more = {"sum_batch": True, "out_dtype": out, "prepare": forced(splits=4)}
        yield case(text, "gemm", *shares, **more)
        few = operands(dtype, 24, i)
        yield case(f"{text}, one step", "gemm", *few, out_dtype=out, prepare=forced())
        text, c = f"{text} with c by columns", by(False, integers(m, n, dtype=out))
        more = {"c": c, "out_dtype": out, "prepare": forced()}
        yield case(text, "gemm", *operands(dtype, 136, i), **more)
    batch = operands(F16, 72, 0, (2,))
    yield case(f"{name} of a batch", "gemm", *batch, out_dtype=F16, prepare=forced())
    yield case(f"{name}, batch summed", "gemm", *batch, sum_batch=True, prepare=forced())
    for out in (F32, F16):
        bias = integers(n, dtype=F16)
        c = integers(m, n, dtype=out)
        more = {"bias": bias, "c": c, "alpha": 101.0, "beta": -3.0, "out_dtype": out}
        yield case(f"{name} with c to {out}", "gemm", *operands(F16), **more, prepare=forced())
    # Results that are rounded.
    for dtype, more in itertools.product((F16, BF16), ({}, {"bias": integers(n, dtype=F16)})):
        text = f"{name} {str(dtype)[6:]} rounded, with {len(more)}"
        more = {**more, "alpha": 101.0, "out_dtype": dtype, "prepare": forced()}
        yield case(text, "gemm", *operands(dtype), **more)
    for dtype in () if sm90 else (F32, F16, BF16):
        bias = integers(2 * n, dtype=dtype)[::2]
        more = {"bias": bias, "out_dtype": F32, "prepare": forced()}
        yield case(f"{name} with strided bias {dtype}", "gemm", *operands(F16, 72), **more)
    if sm90:  # several tiles of a block, and more steps than stages
        m, n, k = 3 * m, 3 * n, 648
        for out in (F32, F16):
            c, bias = integers(m, n, dtype=out), integers(n, dtype=F16)
            more = {"bias": bias, "c": c, "beta": -3.0, "out_dtype": out, "prepare": forced()}
            yield case(f"{name}, many with c to {out}", "gemm", *operands(F16, k), **more)
            text = f"{name}, many to {out}"
            yield case(text, "gemm", *operands(F16, k), out_dtype=out, prepare=forced())
            text = f"{name}, many of bf16 to {out}"
            yield case(text, "gemm", *operands(BF16, k), out_dtype=out, prepare=forced())
            for plan in ({"splits": 2}, {"splits": 3}):
                text = f"{name}, many with {plan} to {out}"
                more = {"out_dtype": out, "prepare": forced(**plan)}
                yield case(text, "gemm", *operands(F16, k), **more)
        m, n = size
    n = size[1] - 5  # rows of the result are not aligned, and end within a vector
    for out, shifted in itertools.product((F32, F16, BF16), (0, 1)):
        a = integers(m, 72, dtype=BF16 if out == BF16 else F16)
        b = by(False, integers(72, n - shifted, dtype=a.dtype))
        c = placed(integers(m, n + 5, dtype=out), shifted)[:, : n - shifted]
        bias = placed(integers(n - shifted, dtype=a.dtype), shifted)
        more = {"bias": bias, "c": c, "alpha": 2.0, "out_dtype": out, "prepare": forced()}
        if not sm90:
            yield case(f"{name} of {n - shifted} columns to {out}", "gemm", a, b, **more)
    n = size[1]
    if sm90:
        a, b = integers(4 * m, 24, dtype=F16), by(False, integers(24, 4 * n, dtype=F16))
        more = {"bias": integers(4 * n, dtype=F16), "out_dtype": F16, "prepare": forced()}
        yield case(f"{name}, many of one step", "gemm", a, b, **more)
        a, b = integers(m, 72, dtype=F16), by(False, integers(72, 40, dtype=F16))
        more = {"c": integers(m, 40, dtype=F32), "out_dtype": F32, "prepare": forced()}
        yield case(f"{name} of few columns", "gemm", a, b, **more)
    for out in () if sm90 else (F16, F32):  # the last row is aligned, and ends within a vector
        a, b = integers(9, 72, dtype=F16), by(False, integers(72, n - 5, dtype=F16))
        more = {"c": integers(9, n - 5, dtype=out), "out_dtype": out, "prepare": forced()}
        yield case(f"{name} of 9 rows to {out}", "gemm", a, b, **more)
    if not sm90:  # several tiles, of which a group has not all
        a, b = integers(3 * m, 40, dtype=F16), by(False, integers(40, 2 * n, dtype=F16))
        yield case(f"{name}, many", "gemm", a, b, out_dtype=F32, prepare=forced())
    for plan in ({"splits": 2}, {"splits": 3}):
        into = integers(m, n, dtype=F32)
        text = f"{name} with {plan}"
        given, bias = operands(BF16, 264, 0), integers(n, dtype=F32)
        yield case(text, "gemm_accumulate_", into, *given, prepare=forced(**plan))
        yield case(text, "gemm", *given, bias=bias, out_dtype=BF16, prepare=forced(**plan))


LAYOUTS = [(True, False), (False, True), (True, True), (False, False)]


def cases(capability: int) -> list[Case]:
    """Return the cases for a device of a capability, 90 for 9.0."""
    torch.manual_seed(0)
    if capability >= 90:
        small, wide = (72, 136), (136, 200)
        products = [(True, 5, small, LAYOUTS), (True, 2, wide, LAYOUTS[:2])]
        return list(itertools.chain(*(of_products(*p) for p in products)))
    products = [
        *((False, tile, (72, 72), LAYOUTS) for tile in (3, 4)),
        (False, 5, (16, 136), LAYOUTS[:2]),
        (False, 8, (69, 67), LAYOUTS),
    ]
    found = [*of_lists(), *of_optimizers()]
    return [*found, *itertools.chain(*(of_products(*p) for p in products))]
