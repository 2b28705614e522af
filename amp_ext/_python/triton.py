"""Calls of the Triton kernels: what they are given is described in csrc/include/amp_ext/lists.h and
optim.h, and is what csrc/bindings/backends/triton.cpp gives them."""

from __future__ import annotations

import functools
import importlib
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from amp_ext._python import choice
from amp_ext._python.checks import DTYPES, is_dense, same_order

CHUNK = 16384
SCRATCH = 1024 * 8
"""Bytes for grad_norm's sums, besides one for each tensor."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


def serves(family: str, device: torch.device) -> bool:
    """Whether the kernels run the calls of a family. While a CUDA graph is captured torch's ops do:
    the tables would be copied from the host's memory as it is then."""
    if choice.name(device) != "triton":
        return False
    if device.type == "cpu":
        return True
    capturing = torch.cuda.is_current_stream_capturing()
    return not capturing and _is_verified(family, str(device))


_answers: dict[tuple[str, str], bool] = {}


def _is_verified(family: str, device: str) -> bool:
    if choice.is_under_test():
        return True
    answer = _answers.get((family, device))
    if answer is None:
        from amp_ext.verify import may_run

        answer = may_run("triton", family, device, False)
        if answer is None:  # for lack of memory, say: the next call asks again
            return False
        _answers[family, device] = answer
    return answer


def _function(module: str, name: str) -> Callable[..., None]:
    """Triton is imported with the first call: that takes a second."""
    return getattr(importlib.import_module(f"amp_ext.triton_kernels.{module}"), name)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- tables ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _sent(content: bytes, device: torch.device, stream: int) -> Tensor:
    """A table on its device. Gradients lie in the same memory in many steps: so the same table is
    often needed again."""
    host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class _Table:
    """Entries by one struct, of which the number of the first chunk comes `behind` others."""

    def __init__(self, layout: str, behind: int) -> None:
        self._layout, self._behind = struct.Struct(layout), behind
        self._content: list[bytes] = []
        self._chunks = 0

    def add(self, numel: int, *values: int) -> None:
        head, tail = values[: self._behind], values[self._behind :]
        self._content.append(self._layout.pack(*head, self._chunks, *tail))
        self._chunks += -(-numel // CHUNK)

    def send(self, device: torch.device) -> tuple[Tensor, tuple[int, int, int]]:
        """The table, and what a launch takes of it: address, entries, chunks."""
        table = _sent(b"".join(self._content) or bytes(8), device, _stream(device))
        return table, (table.data_ptr(), len(self._content), self._chunks)


def _send_tensors(
    tensors: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, tuple[int, int, int]]:
    table = _Table("<QqIBxxx", 2)
    for t in tensors:
        table.add(t.numel(), t.data_ptr(), t.numel(), _NUMBERS[t.dtype])
    return table.send(device)


def _gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors; of those with holes, dense copies."""
    return [
        t
        if not t._is_zerotensor() and is_dense(t)
        else t.clone(memory_format=torch.contiguous_format)
        for t in tensors
    ]


# ---- the ops -----------------------------------------------------------------------------------


def unscale_(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    norm: Tensor | None,
    max_norm: float,
) -> None:
    device = found_inf.device
    dense = _gathered(grads)
    with _on(device):
        _table, place = _send_tensors(dense, device)
        scalars = address(inv_scale), address(found_inf), address(norm)
        _function("lists.unscale", "unscale_")(*place, *scalars, max_norm)
    for grad, copy in zip(grads, dense, strict=True):
        if copy is not grad:
            grad.copy_(copy)


def check_finite(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    device = found_inf.device
    dense = _gathered(grads)
    with _on(device):
        _table, place = _send_tensors(dense, device)
        _function("lists.check_finite", "check_finite")(*place, address(found_inf))


def grad_norm(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norms: Tensor | None
) -> Tensor:
    device = found_inf.device
    dense = _gathered(grads)
    norm = torch.empty((), dtype=torch.float32, device=device)
    sums = torch.empty(SCRATCH + 8 * len(grads), dtype=torch.uint8, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    with _on(device):
        _table, place = _send_tensors(dense, device)
        scalars = map(address, (inv_scale, found_inf, norm, norms, sums, ticket))
        _function("lists.grad_norm", "grad_norm")(*place, *scalars)
    return norm


def cast_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    device = outputs[0].device
    entries, kept, scattered = _Table("<QQqIBBxx", 3), [], []
    for output, source in zip(outputs, inputs, strict=True):
        target = output
        if not is_dense(output):
            target = torch.empty_like(output, memory_format=torch.contiguous_format)
            scattered.append((output, target))
        if source.is_neg() or not is_dense(source) or not same_order(target, source):
            source = torch.empty_strided(
                target.shape, target.stride(), dtype=source.dtype, device=device
            ).copy_(source)
        kept.append((target, source))
        numel = 0 if target.data_ptr() == source.data_ptr() else target.numel()
        dtypes = _NUMBERS[target.dtype], _NUMBERS[source.dtype]
        entries.add(numel, target.data_ptr(), source.data_ptr(), numel, *dtypes)
    with _on(device):
        _table, place = entries.send(device)
        _function("lists.cast", "cast_")(*place)
    for output, target in scattered:
        output.copy_(target)


def update_scale_(
    scale: Tensor,
    trackers: tuple[Tensor, Tensor | None, Tensor | None],
    found_infs: list[Tensor],
    factors: tuple[float, float, int],
    bounds: tuple[float, float],
    hysteresis: tuple[int, bool],
    next_step: Tensor | None,
    history: Tensor | None,
    norm: Tensor | None,
) -> None:
    device = scale.device
    with _on(device):
        places = [address(found_inf) for found_inf in found_infs]
        at = places[0]
        if len(places) > 1:
            table = _sent(struct.pack(f"<{len(places)}Q", *places), device, _stream(device))
            at = table.data_ptr()
        tensors = map(address, (scale, *trackers, next_step, history, norm))
        records = 0 if history is None else len(history) - 1
        update = (*tensors, records, *factors, *map(int, hysteresis), *bounds)
        _function("lists.update_scale", "update_scale_")(at, len(places), update)


def update(
    op: str, columns: Sequence[Sequence[Tensor | None]], options: tuple, scalars: tuple
) -> None:
    """adam_ or sgd_.

    Args:
        columns: params, grads, first moments, second moments, largest second moments, copies,
            steps; for each parameter, None where it has none. All but the grads are dense and in
            the order of params.
        options: as the kernels take them.
        scalars: tensor_lr, found_inf, inv_scale, norm; max_norm.
    """
    params = columns[0]
    if not params:
        return
    device = params[0].device
    entries, kept = _Table("<7Q5B3xqII", 13), []
    for param, grad, *others in zip(*columns, strict=True):
        if (
            grad._is_zerotensor()
            or grad.is_neg()
            or not is_dense(grad)
            or not same_order(grad, param)
        ):
            grad = torch.empty_strided(
                param.shape, param.stride(), dtype=grad.dtype, device=device
            ).copy_(grad)
        first, second, largest, copy, step = others
        kept.append(grad)
        tensors = param, grad, first, second, largest, copy, step
        dtypes = [0 if t is None else _NUMBERS[t.dtype] for t in (param, grad, first, second, copy)]
        numel = param.numel()
        entries.add(numel, *map(address, tensors), *dtypes, numel, 0)
    *tensors, max_norm = scalars
    counts = any(step is not None for step in columns[6])
    ticket = torch.zeros(1, dtype=torch.int32, device=device) if counts else None
    with _on(device):
        _table, place = entries.send(device)
        given = (*map(address, tensors), math.inf if max_norm is None else max_norm)
        _function(f"optim.{op.rstrip('_')}", op)(*place, options, given, address(ticket))
