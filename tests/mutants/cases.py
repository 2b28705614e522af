"""Drive each CUDA kernel by small calls of ops, with the oracle's results to compare with.

They are few and fast: a mutant of a kernel runs the shortest ones that execute its statement.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import reference
from amp_ext import _C, ops
from amp_ext.ops.gemm import Plan
from cases import assert_same, surroundings
from cudasim.mutants import Case

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (F16, BF16, F32, F64)
INF, NAN = float("inf"), float("nan")


def moved(values: Any, device: str) -> Any:
    """Return arguments with copies of the tensors and of the memory around them."""

    def move(tensor: Tensor) -> Tensor:
        copy = surroundings(tensor).to(device, copy=True)
        return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tree_map_only(Tensor, move, values)


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def case(
    name: str,
    op: str,
    *given: Any,
    loose: float = 0.0,
    library: Any = ops,
    **options: Any,
) -> Case:
    """Return a call of an op that must write and return the oracle's results.

    If `loose`, they are compared with this relative error, else bit for bit.
    """
    expected = moved((given, options), "cpu")
    expected_return = getattr(reference, op)(*expected[0], **expected[1])

    def compare(actual: Tensor, expected: Tensor, least: float) -> None:
        if loose:
            error = {"rtol": loose, "atol": loose * least, "equal_nan": True}
            torch.testing.assert_close(actual.cpu(), expected, **error)
        else:
            assert_same(actual, expected)

    def run() -> None:
        written, more = moved((given, options), "cuda")
        returned = getattr(library, op)(*written, **more)
        torch.cuda.synchronize()
        for pair in zip(tensors(returned), tensors(expected_return), strict=True):
            compare(*pair, least=float(op != "grad_norm"))
        for pair in zip(tensors((written, more)), tensors(expected), strict=True):
            compare(*map(surroundings, pair), least=1.0)

    return Case(f"{op} {name}", run)


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


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=F32)


def text_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_norm(name: str, grads: list[Tensor], *factor: Tensor) -> Case:
    return case(name, "grad_norm", grads, scalar(0), *factor, loose=1e-6)


def of_checks(name: str, grads: list[Tensor]) -> Iterator[Case]:
    """Yield the ops that write no norm."""
    yield case(name, "unscale_", grads, scalar(0), scalar(0.0123))
    yield case(f"{name}, by 1", "unscale_", grads, scalar(0), scalar(1))
    yield case(name, "check_finite", grads, scalar(0))


def of_lists() -> Iterator[Case]:
    for dtype, offset in [(F16, 0), (BF16, 1), (F32, 0), (F32, 3), (F64, 1)]:
        name = f"{text_of(dtype)} from {offset}"
        yield from of_checks(name, numbers(dtype, offset=offset))
        yield of_norm(name, numbers(dtype, offset=offset), scalar(0.0123))
        for count in (3, 4, 8):
            turns = numbers(dtype, (count * 512 * 16 // dtype.itemsize + 7, 5), offset)
            yield from of_checks(f"{name}, {count} turns", turns)
            yield of_norm(f"{name}, {count} turns", turns)
    for dtype, other in itertools.product(FLOATS, repeat=2):
        aligned, unlike = ((0, 0), (1, 1)), ((1, 3), (0, 4), (1, 0), (0, 1), (0, 3), (0, 7))
        for offset, place in (*aligned, *unlike):
            text = f"{text_of(dtype)} from {offset} to {text_of(other)} from {place}"
            out = numbers(other, offset=place, around=7.0)
            yield case(text, "cast_", out, numbers(dtype, offset=offset))
    subnormal = [x * 1e-7 for x in numbers(BF16)]
    yield case("to subnormal float16", "cast_", numbers(F16, around=7.0), subnormal)
    for dtype, offset in itertools.product(FLOATS, (0, 1)):
        bad, name = partial(bad_lists, dtype, offset), f"of bad {text_of(dtype)} from {offset}"
        yield each(name, "check_finite", bad())
        yield each(name, "unscale_", bad(), scalar(0.0123))
        yield each(f"{name}, by 1", "unscale_", bad(), scalar(1))
        yield each(name, "grad_norm", itertools.islice(bad(), 18), scalar(0.0123))
    for dtype, norm, factor in itertools.product(FLOATS, (3.0, 0.25, INF), (0.5, 1.0)):
        clip = {"norm": scalar(norm), "max_norm": 1.0}
        name = f"{text_of(dtype)} by {factor}, clipped by {norm}"
        yield case(name, "unscale_", numbers(dtype), scalar(0), scalar(factor), **clip)
    large, many = numbers(F16, (70_000, 3, 40_000)), numbers(F32, [i % 5 for i in range(300)])
    yield from of_checks("large", large)
    yield of_norm("large", large)
    yield from of_checks("many", many)
    yield of_norm("many", many, scalar(0.5))
    large, many = moved((large, many), "cpu")
    large[0][0] = large[-1][-1] = many[-1][-1] = INF
    yield from of_checks("large, bad at both ends", large)
    yield from of_checks("many, one bad", many)
    yield of_norm("of a share's first piece", numbers(F32, (16389,)))  # in the second block
    factors = [(F32, 1e22), (BF16, 1e22), (F16, 600.0)]
    for dtype, factor in [*itertools.product((F32, BF16), (1e-22, 1e-24, 1e-26)), *factors]:
        extreme = [x * factor for x in numbers(dtype, (5, 2051, 16391))]
        yield of_norm(f"of {factor} {text_of(dtype)}", extreme)
    for dtype in (F16, BF16, F32):
        some, least = (make(dtype, (5, 2051, 16391)) for make in (numbers, least_numbers))
        for factor in (1e-23, 1e20):
            yield of_norm(f"{text_of(dtype)} times {factor}", some, scalar(factor))
        factor = scalar(1e-20 if dtype == F16 else 1)
        yield of_norm(f"least {text_of(dtype)}", least, factor)
    yield from of_scales()


def least_numbers(dtype: torch.dtype, sizes: Sequence[int]) -> list[Tensor]:
    """Return the least number that is not 0 in every second place, and zeros."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return [(torch.arange(n) % 2 == 0).to(dtype) * least for n in sizes]


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


def each(name: str, op: str, lists: Iterable[list[Tensor]], *given: Any) -> Case:
    """Return a case of a call for each list, with found_inf behind it."""
    calls = [case(name, op, grads, scalar(0), *given).run for grads in lists]
    return Case(f"{op} {name}", lambda: [call() for call in calls])


def of_scales() -> Iterator[Case]:
    def update(name: str, scale: float, tracker: int, founds: Iterable[float], **more: Any) -> Case:
        given = [scalar(scale), torch.tensor(tracker, dtype=torch.int32), [*map(scalar, founds)]]
        return case(name, "update_scale_", *given, 2.0, 0.5, 4, **more)

    for found, tracker, hysteresis in itertools.product((0, 1), (0, 3), (1, 2)):
        more: dict[str, Any] = {"min_scale": 2.0, "max_scale": 5000.0, "hysteresis": hysteresis}
        more["skipped_steps"] = torch.tensor(5)
        if hysteresis > 1:
            more["hysteresis_tracker"] = torch.tensor(found + 1, dtype=torch.int32)
        name = f"found {found}, {tracker} steps, hysteresis {hysteresis}"
        yield update(name, 4096, tracker, (0, found), **more)
    for scale in (3e38, -3e38):
        yield update(f"at most, {scale}", scale, 3, (0,))
    yield update("of many", 8, 3, (float(i == 19) for i in range(20)))


# ---- optimizers ---------------------------------------------------------------------------------

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
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
        for name in ("exp_avg_sqs", "max_exp_avg_sqs")[: 1 + more.pop("amsgrad", False)]:
            found[name] = values(name, second, True)
    else:
        found["momentum_buffers"] = values("momentum_buffers", first)
    if more.pop("copied", False):
        copies = [param.to(F16) for param in found["params"]]
        for copy in copies:
            copy.view(-1)[::3] += 1.0  # by other code
        found["copies"] = [placed(copy, offset if only in ("", "copies") else 0) for copy in copies]
    found["steps"] = [scalar(6.0 * (i % 4 in (1, 2))) for i in range(len(sizes))]
    return {**found, **(ADAM if op == "adam_" else SGD), **more}


def of_updates(op: str, **own: Any) -> Iterator[Case]:
    """Yield updates with these options."""
    plain, mixed, low = (F32,) * 4, (BF16, F16, BF16, F32), (BF16,) * 4
    sizes = (19, 2, 1030, 64)
    chance = {"stochastic_rounding": True}
    options = " ".join(name for name, value in own.items() if value)

    def update(
        name: str, sizes: Sequence[int] = sizes, kinds: Any = plain, *at: Any, **more: Any
    ) -> Case:
        return case(f"{options} {name}", op, **state(op, sizes, kinds, *at, **{**own, **more}))

    for kinds, offset in ((plain, 0), (plain, 1), (mixed, 0), (mixed, 3)):
        name = f"{text_of(kinds[0])} from {offset}"
        yield update(name, sizes, kinds, offset, copied=kinds == plain)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    for name, offset in itertools.product(names, (1, 2)):
        yield update(f"with {name} from {offset}", sizes, plain, offset, name)
    yield update("with copies from 1", sizes, plain, 1, "copies", copied=True)
    for i in range(4):
        kinds = tuple(BF16 if i == j else F32 for j in range(4))
        yield update(f"of kinds {i}", (6203,), kinds)
    yield update("by chance", sizes, low, **chance)
    grads = numbers(BF16, (70, 9))
    for grad in grads:
        grad[::3] = INF
    yield update("by chance, of infinities", (70, 9), low, grads=grads, **chance)
    scalars = {"found_inf": scalar(0), "inv_scale": scalar(3e38), "norm": scalar(1e30)}
    yield update("scaled out of range", range(3, 32, 4), plain, 1, **scalars, max_norm=1.0)
    scalars |= {"inv_scale": scalar(0.3), "norm": scalar(3.0)}
    yield update("scaled", **scalars, max_norm=1.0)
    yield update("lr", sizes, (F32, BF16, F32, F32), tensor_lr=scalar(0.03))
    skipped, bad_norm = {"found_inf": scalar(1)}, {"norm": scalar(INF), "max_norm": 1.0}
    yield update("skipped", **skipped)
    yield update("of a bad norm", found_inf=scalar(0), **bad_norm)
    yield update("of a bad norm alone", **bad_norm)
    yield update("of equal steps", steps=[scalar(6.0) for _ in sizes])
    yield update("many", [i % 4 for i in range(60)])
    yield update("large", (70_000,) * 4)
    yield update("large, mixed", (70_000, 9), mixed)
    yield update("large, mixed, copied", (70_000, 9), (F32, *mixed[1:]), copied=True)
    yield update("large, copied", (70_000, 9), copied=True)
    yield update("large, by chance", (120_000, 9, 90_000), low, **chance)


# ---- products -----------------------------------------------------------------------------------


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def framed(x: Tensor) -> Tensor:
    """Return a copy of matrices with NaN behind each line, and behind the last line."""
    *batch, rows, columns = x.shape
    memory = torch.full((*batch, rows + 8, columns + 8), NAN, dtype=x.dtype)
    return memory[..., :rows, :columns].copy_(x)


Operands = tuple[Tensor, Tensor]


def of_products(
    sm90: bool, tile: int, size: tuple[int, int], layouts: Sequence[tuple[bool, bool]]
) -> Iterator[Case]:
    """Yield products of one tile: layouts, results, epilogues, shares of k."""
    m, n = size

    def plan(splits: int) -> Plan:
        return Plan("cuda", _C.gemm_variant(tile, splits, sm90))

    def gemm(text: str, operands: Operands, splits: int = 1, **more: Any) -> Case:
        return case(f"tile {tile} {text}", "gemm", *operands, library=plan(splits), **more)

    def operands(
        dtype: torch.dtype, k: int = 136, layout: int = 0, batch: Sequence[int] = (), times: int = 1
    ) -> Operands:
        rows_a, rows_b = layouts[layout]
        a = integers(*batch, times * m, k, dtype=dtype)
        b = integers(*batch, k, times * n, dtype=dtype)
        return (
            framed(a) if rows_a else framed(a.mT).mT,
            framed(b) if rows_b else framed(b.mT).mT,
        )

    def small(dtype: torch.dtype, m: int, k: int, n: int) -> Operands:
        return integers(m, k, dtype=dtype), by_columns(integers(k, n, dtype=dtype))

    for i, dtype in itertools.product(range(len(layouts)), (F16, BF16)):
        out = {"out_dtype": (F32, dtype)[i % 2]}
        text = f"of layout {layouts[i]} {text_of(dtype)}"
        yield gemm(text, operands(dtype, 136, i), **out)
        yield gemm(f"{text}, one step", operands(dtype, 24, i), **out)
        c = by_columns(integers(m, n, dtype=out["out_dtype"]))
        if not sm90:  # TMA loads no such c
            yield gemm(f"{text} with c by columns", operands(dtype, 136, i), c=c, **out)
        shares = operands(dtype, 136, i, (2,))
        yield gemm(f"{text} of a batch in 4 shares", shares, 4, sum_batch=True, **out)
    batch = operands(F16, 72, 0, (2,))
    yield gemm("of a batch", batch, out_dtype=F16)
    yield gemm("of a batch, summed", batch, sum_batch=True)
    for out in (F32, F16):
        more = {"bias": integers(n, dtype=F16), "c": integers(m, n, dtype=out), "beta": -3.0}
        yield gemm(f"with c to {out}", operands(F16), alpha=101.0, out_dtype=out, **more)
    for dtype, more in itertools.product((F16, BF16), ({}, {"bias": integers(n, dtype=F16)})):
        more = {"alpha": 101.0, "out_dtype": dtype, **more}
        yield gemm(f"{text_of(dtype)} rounded, with {len(more)}", operands(dtype), **more)
    for splits in (2, 3):
        given, text = operands(BF16, 264), f"with {splits} splits"
        library, into = plan(splits), integers(m, n, dtype=F32)
        yield case(f"tile {tile} {text}", "gemm_accumulate_", into, *given, library=library)
        yield gemm(text, given, splits, bias=integers(n, dtype=F32), out_dtype=BF16)
    if sm90:
        for out in (F32, F16):  # several tiles of a block, and more steps than stages
            text = f"many to {out}"
            c, bias = integers(3 * m, 3 * n, dtype=out), integers(3 * n, dtype=F16)
            many = operands(F16, 648, times=3)
            yield gemm(f"{text} with c", many, bias=bias, c=c, beta=-3.0, out_dtype=out)
            for splits in (1, 2, 3):
                yield gemm(f"{text} with {splits} splits", many, splits, out_dtype=out)
            yield gemm(f"{text} of bf16", operands(BF16, 648, times=3), out_dtype=out)
        bias = integers(4 * n, dtype=F16)
        yield gemm("many of one step", small(F16, 4 * m, 24, 4 * n), bias=bias, out_dtype=F16)
        c = integers(m, 40, dtype=F32)
        yield gemm("of few columns", small(F16, m, 72, 40), c=c, out_dtype=F32)
        return
    for dtype in (F32, F16, BF16):
        bias = integers(n, dtype=dtype)
        yield gemm(f"with bias {dtype}", operands(F16, 72), bias=bias, out_dtype=F32)
    # Rows of the result are not aligned, and end within a vector.
    for out, shifted in itertools.product((F32, F16, BF16), (0, 1)):
        given = small(BF16 if out == BF16 else F16, m, 72, n - 5 - shifted)
        c = placed(integers(m, n, dtype=out), shifted)[:, : n - 5 - shifted]
        bias = placed(integers(n - 5 - shifted, dtype=given[0].dtype), shifted)
        more = {"bias": bias, "c": c, "alpha": 2.0, "out_dtype": out}
        yield gemm(f"of {n - 5 - shifted} columns to {out}", given, **more)
    for out in (F16, F32):  # the last row is aligned, and ends within a vector
        c = integers(9, n - 5, dtype=out)
        yield gemm(f"of 9 rows to {out}", small(F16, 9, 72, n - 5), c=c, out_dtype=out)
    # Several tiles, of which a group has not all.
    yield gemm("many", small(F16, 3 * m, 40, 2 * n), out_dtype=F32)


LAYOUTS = [(True, False), (False, True), (True, True), (False, False)]


def cases(capability: int) -> list[Case]:
    """Return the cases for a device of a capability, 90 for 9.0."""
    torch.manual_seed(0)
    if capability >= 90:
        products = [(True, 5, (72, 136), LAYOUTS), (True, 2, (136, 200), LAYOUTS[:2])]
        found = []
    else:
        products = [(False, tile, (72, 72), LAYOUTS) for tile in (3, 4)]
        products += [(False, 5, (16, 136), LAYOUTS[:2]), (False, 8, (69, 67), LAYOUTS)]
        found = [*of_lists()]
        found += of_updates("adam_", decoupled=True)
        found += of_updates("adam_", decoupled=False, amsgrad=True, maximize=True)
        found += of_updates("sgd_", nesterov=False)
        found += of_updates("sgd_", nesterov=True, maximize=True, dampening=0.0)
    return [*found, *itertools.chain(*(of_products(*p) for p in products))]
