"""The checks of the arguments of ops on lists, as of csrc/bindings/checks: before anything is
written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""In the order of their numbers in csrc/include/amp_ext/dtype.h."""
HALVES = (torch.float16, torch.bfloat16)
_TYPES = {  # as c10::toString has them
    torch.float32: ("Float", "a float tensor"),
    torch.int32: ("Int", "an int tensor"),
    torch.int64: ("Long", "a long tensor"),
    torch.float64: ("Double", ""),
    torch.float16: ("Half", ""),
    torch.bfloat16: ("BFloat16", ""),
    torch.complex64: ("ComplexFloat", ""),
    torch.complex128: ("ComplexDouble", ""),
    torch.uint8: ("Byte", ""),
    torch.int8: ("Char", ""),
    torch.int16: ("Short", ""),
}

Span = tuple[int, int]
"""Addresses of a tensor's first byte and behind its last; (0, 0) where it has no elements."""


def type_name(dtype: torch.dtype) -> str:
    return _TYPES.get(dtype, (str(dtype).removeprefix("torch.").capitalize(), ""))[0]


def is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def overlaps(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise RuntimeError(
            f"{op}: Expected all tensors to be on the same device, but {name} is on "
            f"{tensor.device} and others are on {device}"
        )


def checked_dtype(op: str, name: str, tensor: Tensor, device: torch.device) -> torch.dtype:
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{op}: {name} must be a strided tensor, got layout {_layout(tensor)}"
        )
    check_device(op, name, tensor, device)
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(
            f"\"{op}\" not implemented for '{type_name(tensor.dtype)}': {name} must be float16, "
            "bfloat16, float32 or float64"
        )
    return tensor.dtype


def _layout(tensor: Tensor) -> str:
    words = str(tensor.layout).removeprefix("torch.").split("_")
    return "".join(word.capitalize() for word in words if word != "coo")


def checked_span(op: str, name: str, tensor: Tensor) -> Span:
    """Where a tensor lies. Raises where its storage does not hold it."""
    if tensor.numel() == 0:
        return 0, 0
    storage = tensor.untyped_storage()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))  # noqa: B905
    size = tensor.element_size()
    offset = tensor.storage_offset() * size
    begin = storage.data_ptr()
    held = storage.nbytes() if begin else 0
    if offset + extent * size > held:
        raise RuntimeError(
            f"{op}: {name} needs a storage of {offset + extent * size} bytes, but its storage has "
            f"{held}: expected one that has not been freed or shrunk by untyped_storage().resize_()"
        )
    return begin + offset, begin + offset + extent * size


def check_no_internal_overlap(op: str, name: str, tensor: Tensor) -> None:
    reach = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride <= reach:
            raise RuntimeError(
                f"{op}: {name} has strides {list(tensor.stride())}: unsupported operation: more "
                "than one element of the written-to tensor refers to a single memory location. "
                "Please clone() the tensor before performing the operation."
            )
        reach += stride * (size - 1)


def check_not_negated(op: str, name: str, tensor: Tensor) -> None:
    if tensor.is_neg():
        raise RuntimeError(
            f"{op}: {name} is a negated view, expected a tensor that is stored as it is: "
            "resolve_neg() it"
        )


def check_no_history(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: {name} requires grad, and this op is not differentiable: expected "
            "torch.no_grad()"
        )


def check_max_norm(op: str, max_norm: float | None, norm: Tensor | None) -> None:
    if max_norm is None:
        return
    if not max_norm >= 0:
        raise ValueError(f"{op}: max_norm must be a number that is not negative, got {max_norm:g}")
    if norm is None:
        raise ValueError(f"{op}: max_norm = {max_norm:g} needs a norm, got None")


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether elements of the same index lie at the same place of two tensors of one shape."""
    if a.stride() == b.stride():
        return True
    dims = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or x == y for size, x, y in dims)


def checked_grads(
    op: str, grads: Sequence[Tensor], device: torch.device, written: bool
) -> list[Span]:
    """The places of gradients; those that are written share no memory. Of one with holes only the
    first element counts for that."""
    spans, solid = [], []
    for index, grad in enumerate(grads):
        name = f"grads[{index}]"
        checked_dtype(op, name, grad, device)
        if grad._is_zerotensor():
            if written:
                raise RuntimeError(
                    f"{op}: ZeroTensors are immutable, expected {name} to have memory: clone() it"
                )
            spans.append((0, 0))
            continue
        span = checked_span(op, name, grad)
        spans.append(span)
        if not written:
            continue
        check_no_history(op, name, grad)
        if not is_dense(grad):
            check_no_internal_overlap(op, name, grad)
            span = span[0], span[0] + grad.element_size() * bool(span[0])
        solid.append((*span, index))
    _check_apart(op, "grads", solid)
    return spans


def _check_apart(op: str, name: str, places: list[tuple[int, int, int]]) -> None:
    places = sorted(place for place in places if place[0] != place[1])
    for (_, end, i), (begin, _, j) in zip(places, places[1:]):  # noqa: B905, RUF007
        if begin < end:
            first, second = sorted((i, j))
            raise RuntimeError(
                f"{op}: {name}[{first}] and {name}[{second}] overlap in memory, expected tensors "
                "that share none: clone() one"
            )


class Arguments:
    """The other tensors of a call, by name. What it writes shares no memory with anything else."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op, self.device = op, device
        self._written: list[tuple[str, Span]] = []
        self._read: list[tuple[str, Span]] = []

    def one(
        self,
        name: str,
        tensor: Tensor | None,
        *,
        written: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor | None:
        """Of one element."""
        if tensor is None:
            return None
        self.add(name, self.checked_one(name, tensor, dtype), written)
        return tensor

    def checked_one(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Span:
        self._check_strided(name, tensor)
        if tensor.numel() != 1:
            raise RuntimeError(
                f"{self.op}: {name} must be a 1-element tensor, got shape {list(tensor.shape)}"
            )
        return self._checked_data(name, tensor, dtype)

    def rows(self, name: str, tensor: Tensor | None, size: int | None = None) -> None:
        """Contiguous float32, written; of shape [size] if that is given."""
        if tensor is None:
            return
        self._check_strided(name, tensor)
        if size is not None and tensor.shape != (size,):
            raise RuntimeError(
                f"{self.op}: {name} must have shape [{size}], got shape {list(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"{self.op}: {name} must be contiguous, got strides {list(tensor.stride())}"
            )
        self.add(name, self._checked_data(name, tensor, torch.float32), written=True)

    def _check_strided(self, name: str, tensor: Tensor) -> None:
        check_device(self.op, name, tensor, self.device)
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"{self.op}: {name} must be a strided tensor, got layout {_layout(tensor)}"
            )

    def _checked_data(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Span:
        if tensor.dtype != dtype:
            raise RuntimeError(
                f"{self.op}: {name} must be {_TYPES[dtype][1]}, got {type_name(tensor.dtype)}"
            )
        check_not_negated(self.op, name, tensor)
        return checked_span(self.op, name, tensor)

    def add(self, name: str, span: Span, written: bool) -> None:
        for other, theirs in self._written:
            self._check_apart(other, theirs, name, span)
        if written:
            for other, theirs in self._read:
                self._check_apart(name, span, other, theirs)
        (self._written if written else self._read).append((name, span))

    def _check_apart(self, written: str, span: Span, other: str, theirs: Span) -> None:
        if overlaps(span, theirs):
            raise RuntimeError(
                f"{self.op}: {written} and {other} overlap in memory, expected {written} apart "
                "from all else: clone() it"
            )

    def check_apart_from(self, grads: Iterable[Span], written: bool) -> None:
        """From gradients, which are written or not."""
        grads = list(grads)
        for name, span in [*self._written, *(self._read if written else ())]:
            index = next((i for i, grad in enumerate(grads) if overlaps(grad, span)), None)
            if index is not None:
                raise RuntimeError(
                    f"{self.op}: grads[{index}] and {name} overlap in memory, expected {name} "
                    "apart from the gradients: clone() it"
                )
