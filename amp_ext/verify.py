"""Compare a GPU's kernels with their references before the first use.

The result is kept. A family is verified apart from the rest: an op on lists, or the products of one
operand dtype, by one backend on one kind of device. ``python -m amp_ext`` verifies all families
again.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from amp_ext import _cache, ops
from amp_ext._library import _C
from amp_ext._triton import is_interpreted, why_not_triton
from amp_ext._warnings import warn
from amp_ext.ops._op import Case
from amp_ext.ops.gemm import product_cases

CPU = torch.device("cpu")
_LISTS = {op.removesuffix("_"): op for op in ops.LIST_OPS}
FAMILIES = (*_LISTS, "gemm_f16", "gemm_bf16")


class Result(NamedTuple):
    """The outcome of a comparison.

    Attributes:
        failure: the difference; empty if nothing differs.
        day: the day of the comparison; empty if the kernels could not run. The failure then holds
            for this process alone.
    """

    failure: str
    day: str


class WrongResult(Exception):
    """A kernel's result differs from the reference's."""


_lock = threading.Lock()
_known: dict[str, dict[str, Result]] = {}
"""The results that this process has read or found, by device, then by "backend family"."""
_warned: set[str] = set()


# ---- the answer --------------------------------------------------------------------------------


def may_run(backend: str, family: str, device: str, capturing: bool) -> bool | None:
    """Return whether a backend may run a family's calls, or None if unknown.

    The function reads the record or compares, but compares nothing during the capture of a CUDA
    graph. C++ calls it where a backend is chosen (verified.cpp).
    """
    if os.environ.get("AMP_EXT_VERIFY") == "0":
        return True
    with _lock:
        result = known(device).get(f"{backend} {family}")
        if result is None and not capturing:
            result = verify_family(backend, family, device)
    if result is None:
        return None
    # Warnings run the user's code, and that may compute a product: not under the lock.
    if result.failure:
        kernels = f"the {backend} kernels of {family}"
        instead = "no other kernels run in their place"
        if family.startswith("gemm"):
            instead = "torch's library runs in their place"
        elif backend != "triton":
            instead = "the Triton kernels run in their place, if they pass"
        verdict = "did not pass their verification" if result.day else "cannot run"
        text = f"{kernels} {verdict} on {device}: {result.failure}; {instead}"
        if result.day:
            text += (
                ". Please report it as an issue of amp_ext's repository, with the output of "
                "`python -m amp_ext`, which also tries again."
            )
        if text not in _warned:
            _warned.add(text)
            warn(f"amp_ext: {text}", RuntimeWarning)
    return not result.failure


def known(device: str) -> dict[str, Result]:
    """Return the known results of the kernels of a device, by "backend family"."""
    if device not in _known:
        entries = _cache.read(device, "verified", (str, str, str))
        _known[device] = {name: Result(*result) for name, *result in entries}
    return _known[device]


def verified_backends() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each backend under verification, its GPU and its families in use.

    The active backend has all of its families, the Triton kernels beside it the known ones.
    """
    for device in _cache.devices()[1:]:
        try:
            backend = _C.choose("amp_ext", "cuda")
            used = families(backend, torch.device(device))
        except (AssertionError, RuntimeError):  # the doctor's checks show why
            continue
        yield backend, device, used
        tried = tuple(name for name in FAMILIES if f"triton {name}" in known(device))
        if tried and backend != "triton":
            yield "triton", device, tried


def families(backend: str, device: torch.device) -> tuple[str, ...]:
    """Return the families that a backend has on a device."""
    half = torch.empty(8, 8, dtype=torch.float16, device=device)
    return FAMILIES if _C.Product(half, half).why_not(backend) is None else tuple(_LISTS)


# ---- the comparison ----------------------------------------------------------------------------


def cases(family: str, backend: str, device: torch.device) -> Iterator[Case]:
    """Yield the cases of a family."""
    if family in _LISTS:
        yield from getattr(ops, _LISTS[family]).cases()
    else:
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[family.rpartition("_")[2]]
        is_sm90 = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        yield from product_cases(dtype, backend, is_sm90)


def verify_family(backend: str, family: str, device: str) -> Result | None:
    """Compare all cases, whatever the record says, and remember the result.

    Returns None without a result: the memory is too little, another thread captures a graph, or an
    earlier error has ended the use of the device.
    """
    # A thread of its own has none of the caller's modes: autocast, inference, default device,
    # stream, dispatch keys.
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(_outcome, backend, family, torch.device(device)).result()
    if result is not None:
        name = f"{backend} {family}"
        known(device)[name] = result
        if result.day:
            _cache.append(device, "verified", [(name, *result)])
    return result


def _outcome(backend: str, family: str, device: torch.device) -> Result | None:
    what, today = family, time.strftime("%Y-%m-%d")
    # Copies wait for the device, and a mode of the whole process may forbid waits.
    sync_mode = torch.cuda.get_sync_debug_mode()
    try:
        if sync_mode:
            torch.cuda.set_sync_debug_mode(0)
        torch.cuda.set_device(device)
        if backend == "triton" and (reason := why_not_triton()):
            raise RuntimeError(reason)
        if backend == "triton" and is_interpreted():
            raise RuntimeError("TRITON_INTERPRET is set")
        _C.put_under_test(backend)
        torch.set_flush_denormal(False)
        if _has_failed(device):
            return None
        for case in cases(family, backend, device):
            what = f"{case.op}, {case.what}"
            compare(case, device)
        return Result("", today)
    except WrongResult as error:
        return Result(f"{what}: {error}", today)
    except Exception as error:  # of any type: training goes on without the kernels
        if any(words in str(error) for words in ("out of memory", "is capturing")):
            return None
        return Result(f"{what}: {error}", today if _has_failed(device) else "")
    finally:
        if sync_mode:
            torch.cuda.set_sync_debug_mode(sync_mode)


def _has_failed(device: torch.device) -> bool:
    """Return whether a kernel has ended this process's use of the device."""
    try:
        # Synchronising the device would end another thread's capture.
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        return True
    return False


def compare(case: Case, device: torch.device) -> None:
    """Raise WrongResult where results differ, or the memory that the arguments view."""

    def call(function: Any, device: torch.device) -> dict[str, Any]:
        arguments = _copy(case.arguments, device)
        return _copy({**arguments, "result": function(**arguments)}, CPU)

    op = getattr(ops, case.op)
    expected = call(op.reference, CPU)
    for function in [getattr(plan, case.op) for plan in case.plans] or [op]:
        names, ours = zip(*tree_flatten_with_path(call(function, device))[0], strict=True)
        tensors = [
            (f"{name[0].key}{keystr(name[1:])}", one, other)
            for name, one, other in zip(names, ours, tree_leaves(expected), strict=True)
            if isinstance(one, Tensor)
        ]
        for name, one, other in tensors:
            _expect_equal(name, one, other)
            one.copy_(other)
        memory = {
            one.untyped_storage().data_ptr(): (name, one, other) for name, one, other in tensors
        }
        for name, one, other in memory.values():
            if not torch.equal(_memory(one), _memory(other)):
                raise WrongResult(f"the memory around {name} is not as it was")


def _expect_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise WrongResult(f"{name} is {actual.dtype} of shape {list(actual.shape)}")
    if torch.equal(actual, expected):
        return
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not same.all():
        index = (~same).nonzero()[0].tolist()
        ours, theirs = actual[tuple(index)].item(), expected[tuple(index)].item()
        raise WrongResult(f"element {index} of {name} is {ours}, expected {theirs}")


def _copy(value: Any, device: torch.device) -> Any:
    """Return copies of tensors on a device, with all memory in their view."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in memory:
            memory[address] = _memory(tensor).to(device, copy=True).untyped_storage()
        result = torch.empty(0, dtype=tensor.dtype, device=device)
        offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        return result.set_(memory[address], offset, shape, stride)

    return tree_map_only(Tensor, copy, value)


def _memory(tensor: Tensor) -> Tensor:
    """Return the bytes of the memory that a tensor views."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
