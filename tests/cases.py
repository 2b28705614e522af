"""Gradients for the conformance tests: every memory layout, every bit pattern, every edge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

OPS = ("unscale_", "check_finite", "grad_norm", "update_scale_")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NON_FINITE = (float("inf"), float("-inf"), float("nan"))

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNKS = (16 * 1024, 64 * 1024)
SIZES = (1, 2, 7, 33, *(chunk + step for chunk in CHUNKS for step in (-1, 0, 1)))
"""Numbers of elements around the sizes into which the backends cut a tensor."""


def edges(size: int) -> list[int]:
    """Return the positions at which a bad value is most easily missed in `size` elements."""
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
    """Return gradients of the size that a loss scale of 2**10 or so gives."""
    return (torch.randn(shape) * 2.0**8).to(dtype).to(device)


def whole_and_view(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random whole tensor and a view of it in the named layout."""
    shape, view = (LAYOUTS | OVERLAPPING)[name]
    whole = random(shape, dtype, device)
    return whole, view(whole)


def arguments(name: str, device: torch.device) -> dict[str, Any]:
    """Return valid arguments of an op."""
    one = torch.ones((), device=device)
    zero = torch.zeros((), device=device)
    if name == "update_scale_":
        return {
            "scale": 4 * one,
            "growth_tracker": zero.int(),
            "found_infs": [zero, one.clone()],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1,
            "hysteresis": 2,
            "hysteresis_tracker": 2 * one.int(),
            "skipped_steps": zero.long(),
        }
    grads = [torch.ones(3, device=device), torch.ones(2, 4, device=device).half().t(), 2 * one]
    last = {"bad_tensor": zero.long()} if name == "check_finite" else {"inv_scale": one / 2}
    return {"grads": grads, "found_inf": zero, **last}


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def all_bit_patterns(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit type once."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def random_bit_patterns(count: int, dtype: torch.dtype) -> Tensor:
    """Return random values of a 32- or 64-bit type: all exponents, subnormals, infs and NaNs."""
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    patterns = torch.randint(torch.iinfo(integer).min, torch.iinfo(integer).max, (count,))
    return patterns.to(integer).view(dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equal bits; NaNs need not have the same payload."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    differs = (bits(actual) != bits(expected)) & ~(actual.isnan() & expected.isnan())
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} elements differ, the first at {first}: "
            f"{actual[first].item()!r} instead of {expected[first].item()!r}"
        )


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


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage, the surroundings of a view included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def unwritten(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Assert that nothing has been written to the storages of the tensors within the block.

    Tensors without a storage to look at (meta, sparse) are passed over.
    """
    visible = [t for t in tensors if t.layout == torch.strided and not t.is_meta]
    before = [raw(t).clone() for t in visible]
    yield
    for index, (tensor, saved) in enumerate(zip(visible, before, strict=True)):
        assert torch.equal(raw(tensor), saved), f"tensor {index} has been written"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
