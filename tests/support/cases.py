"""Inputs for the conformance tests: every memory layout, bit pattern and edge; and comparisons."""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NON_FINITE = (float("inf"), float("-inf"), float("nan"))

PAIRS = [*itertools.product(FLOATS[:3], repeat=2), (torch.float64, torch.float64)]
"""The dtypes that the two operands of a product may have."""
KINDS = [PAIRS[0], PAIRS[5], PAIRS[6], PAIRS[8], PAIRS[9]]
"""Some of them: equal and mixed, each dtype on either side."""
TRANSPOSES = list(itertools.product((False, True), repeat=2))

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNKS = (16 * 1024, 64 * 1024)
SIZES = (1, 2, 7, 33, *(chunk + step for chunk in CHUNKS for step in (-1, 0, 1)))
"""Numbers of elements around the sizes into which the backends cut a tensor."""


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch computes products of a 16-bit dtype by the processor's instructions."""
    flag = {torch.float16: "avx512_fp16", torch.bfloat16: "avx512_bf16"}[dtype]
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return flag in Path("/proc/cpuinfo").read_text().split()


def edges(size: int) -> list[int]:
    """Return positions where a bad value is easily missed in `size` elements."""
    near_chunks = [chunk + step for chunk in CHUNKS for step in (-1, 0, 1)]
    wanted = {0, 1, 2, 3, 7, 15, size // 2, size - 4, size - 2, size - 1, *near_chunks}
    return sorted(position for position in wanted if 0 <= position < size)


# Name -> (shape of a whole tensor, the gradient as a view of it).
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "contiguous": ((7, 9), lambda t: t),
    "zero-dim": ((3,), lambda t: t[1]),
    "empty": ((5,), lambda t: t[3:3]),
    "empty-matrix": ((0, 5), lambda t: t),
    "transposed": ((17, 33), lambda t: t.t()),
    "columns": ((20, 20), lambda t: t[:, :5]),
    "inner-block": ((9, 70), lambda t: t[1:8, 1:68]),
    "every-third": ((1001,), lambda t: t[::3]),
    "steps": ((31, 45), lambda t: t[::2, 1::3]),
    "offset-1": ((70_001,), lambda t: t[1:]),
    "offset-2": ((1_003,), lambda t: t[2:-1]),
    "offset-3": ((16_390,), lambda t: t[3:]),
    "channels-last": ((2, 3, 5, 7), lambda t: t.view(2, 5, 7, 3).permute(0, 3, 1, 2)),
    "channels-last-3d": ((2, 3, 2, 5, 7), lambda t: t.view(2, 2, 5, 7, 3).permute(0, 4, 1, 2, 3)),
    "permuted": ((4, 5, 6), lambda t: t.permute(2, 0, 1)),
    "diagonal": ((12, 12), lambda t: t.diagonal()),
    "stride-0-of-size-1": ((11,), lambda t: t.expand(1, 11)),
    "interleaved-rows": ((6,), lambda t: t.as_strided((2, 2), (2, 3))),
}

# The same, but elements share memory: an error where the op writes, legal where it only reads.
OVERLAPPING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "expanded": ((3, 1), lambda t: t.expand(3, 4)),
    "sliding-window": ((9,), lambda t: t.unfold(0, 4, 1)),
}


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return gradients of about the size of a loss scale of 2**10."""
    return (torch.randn(shape) * 2.0**8).to(dtype).to(device)


def whole_and_view(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random whole tensor and a view of it in the named layout."""
    shape, view = (LAYOUTS | OVERLAPPING)[name]
    whole = random(shape, dtype, device)
    return whole, view(whole)


def written(op: str) -> tuple[str, ...]:
    """Return the arguments that an op writes."""
    schema = getattr(torch.ops.amp_ext, op).default._schema
    return tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def patterns(dtype: torch.dtype, device: torch.device, count: int = 200_000) -> Tensor:
    """Return every value of a 16-bit type; of others random exponents, subnormals, infs, NaNs."""
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    info = torch.iinfo(integer)
    if dtype.itemsize == 2:
        values = torch.arange(info.min, info.max + 1)
    else:
        values = torch.randint(info.min, info.max, (count,))
    return values.to(integer).view(dtype).to(device)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equal bits; NaNs need not have the same payload."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    same = (bits(actual) == bits(expected)) | (actual.isnan() & expected.isnan())
    _assert_all(same, actual, expected)


def _assert_all(good: Tensor, actual: Tensor, expected: Tensor) -> None:
    if not good.all():
        first = tuple((~good).nonzero()[0].tolist())
        values = f"{actual[first]} instead of {expected[first]}"
        count = f"{int((~good).sum())} of {good.numel()}"
        raise AssertionError(f"{count} elements are wrong, the first at {first}: {values}")


def integers(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, limit: int = 3
) -> Tensor:
    """Return integers from -limit to limit: products of thousands of them add up without error."""
    return torch.randint(-limit, limit + 1, shape).to(dtype).to(device)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the size of activations and weights."""
    return torch.randn(shape).to(dtype).to(device)


def _among_nans(values: Tensor, shape: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> Tensor:
    return view(values.new_full(shape, float("nan"))).copy_(values)


# Name -> a matrix or a batch of them in that layout, from one that is contiguous. The values are
# the same, except that an expanded layout repeats the first row, column or matrix. Memory between
# and around them is NaN.
OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "misaligned": lambda t: _among_nans(t, (t.numel() + 1,), lambda w: w[1:].view(t.shape)),
    "inner-block": lambda t: _among_nans(
        t, (*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3), lambda w: w[..., 1:-1, 1:-2]
    ),
    "every-second": lambda t: _among_nans(
        t, (*t.shape[:-1], 2 * t.shape[-1]), lambda w: w[..., ::2]
    ),
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch-innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded-rows": lambda t: t[..., :1, :].expand_as(t),
    "expanded-columns": lambda t: t[..., :1].expand_as(t),
    "expanded-batch": lambda t: t[:1].expand_as(t),
}


def stored(matrix: Tensor, transposed: bool, layout: str = "contiguous") -> Tensor:
    """Return a matrix as an operand in the named layout, transposed if `transposed`."""
    return OPERANDS[layout](matrix.mT.contiguous() if transposed else matrix)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours in `dtype` around each value (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(info.tiny, info.max)).exponent - 1
    return info.eps * exponent.double().exp2()


def assert_sum_near(
    actual: Tensor, exact: Tensor, magnitude: Tensor, terms: int, unit: float = 2.0**-24
) -> None:
    """Assert that `actual` is `exact` up to the error of a sum of products, rounded once.

    A sum of `terms` products with unit roundoff `unit` is off by terms * unit * sum(|products|) at
    most, to first order. This holds in any order, with fused multiply-adds or not (Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1). The factor alpha and its
    own rounding, and the additions of beta * c and of the bias, add one unit each: 4. Half a
    spacing of the result's dtype is for the final rounding. Overflow rounds to the next power of
    two, so to speak: infinities and too large exact values are replaced by it.

    Args:
        actual: of any dtype.
        exact: float64; where it is infinite or NaN, `actual` must be the same.
        magnitude: float64, sum(|products|) + |beta * c| + |bias| of each element.
        terms: the number of products.
        unit: 2**-24 for sums in float32. For sums in float64 2 * 2**-53: `exact` is one too.
    """
    assert actual.shape == exact.shape
    dtype, actual = actual.dtype, actual.detach().cpu().double()
    exact, magnitude = exact.detach().cpu(), magnitude.detach().cpu()
    error = (terms + 4) * unit * magnitude
    allowed = error + spacing(exact.abs() + error, dtype) / 2
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    info = torch.finfo(dtype)
    beyond = info.max if dtype == torch.float64 else 2 * info.max / (2 - info.eps)  # a power of two
    off = (actual.clamp(-beyond, beyond) - exact.clamp(-beyond, beyond)).abs()
    _assert_all(same | (exact.isfinite() & (off <= allowed)), actual, exact)


def assert_equal(actual: Tensor, exact: Tensor) -> None:
    """Assert that `actual` is `exact` (float64), rounded once; zeros may differ in sign."""
    expected = exact.detach().cpu().to(actual.dtype)
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=0, atol=0, equal_nan=True)


def assert_all_same(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Assert equal bits in two lists of tensors."""
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return deep copies; a view is copied together with the whole storage around it."""
    return [
        torch.empty(0, dtype=t.dtype, device=t.device).set_(
            t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]


def surroundings(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())


def tensors(values: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments of an op."""
    listed = [x if isinstance(x, list) else [x] for x in values.values()]
    return [x for each in listed for x in each if isinstance(x, Tensor)]


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage, the surroundings of a view included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def unwritten(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Assert that the block writes nothing to the storages of the tensors.

    Tensors without a visible storage (meta, sparse) are skipped.
    """
    visible = [t for t in tensors if t.layout == torch.strided and not t.is_meta]
    before = [raw(t).clone() for t in visible]
    yield
    for index, (tensor, saved) in enumerate(zip(visible, before, strict=True)):
        assert torch.equal(raw(tensor), saved), f"tensor {index} has been written"


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    """Save a value, and return what torch loads from the file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
