"""Compares a GPU's kernels with the reference before they are first used, and remembers the result.

A family is what is verified apart from the rest: an op on lists, or the products of one operand
type by one kernel, by one backend on one kind of device. ``python -m amp_ext verify`` runs all.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

import amp_ext
from amp_ext import _cache, ops, reference
from amp_ext._cache import fingerprint
from amp_ext._library import _C
from amp_ext._triton import triton_version
from amp_ext._verify_cases import FAMILIES, PRODUCTS, Case, cases
from amp_ext._warnings import warn
from amp_ext.backend import gemm_kernels

CPU = torch.device("cpu")


class Result(NamedTuple):
    """What came of a comparison.

    Attributes:
        failure: what differs; empty where nothing does.
        day: of the comparison.
    """

    failure: str
    day: str


class WrongResult(Exception):
    """Of a kernel."""


_lock = threading.Lock()
_records: dict[str, dict[str, Result]] = {}  # what has been read or written, by name
_unusable: dict[tuple[str, str, str], str] = {}
"""Why a backend cannot run a family on a device in this process, which says nothing of others."""
_warned: set[str] = set()


# ---- the answer --------------------------------------------------------------------------------


def is_on() -> bool:
    return os.environ.get("AMP_EXT_VERIFY") != "0"


def may_run(backend: str, family: str, device: str, capturing: bool) -> bool | None:
    """Whether a backend may run the calls of a family; None where that is unknown for now.

    Reads the record, or else compares, unless a CUDA graph is being captured. Called where a
    backend is chosen (verified.cpp).
    """
    if not is_on():
        return True
    kernels = f"the {backend} kernels of {family}"
    instead = "torch's own ops run in their place"
    if family.startswith("gemm_sm"):
        instead = f"other kernels or {instead}"
    with _lock:
        result = results(backend, device).get(family)
        reason = _unusable.get((backend, family, device), "")
        is_unknown = result is None and not reason
        if is_unknown and not capturing:
            result = verify_family(backend, family, device)
            reason = _unusable.get((backend, family, device), "")
    # Warnings run code of the user's, which may compute a product: not under the lock.
    if is_unknown and capturing:
        _warn(
            f"{kernels} have not been verified on {device}, and a CUDA graph captures torch's "
            "ops in their place: run a step before the capture"
        )
        return None
    if reason:
        _warn(f"{kernels} cannot run on {device}: {reason}; {instead}")
        return False
    if result is None:
        return None
    if result.failure:
        _warn(
            f"{kernels} did not pass their verification on {device} ({_name_of(device)}): "
            f"{result.failure}; {instead}. Please report what `python -m amp_ext verify` prints; "
            "it also tries again."
        )
    return not result.failure


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn(f"amp_ext: {text}", RuntimeWarning)


def verified_backends() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The backends that have to be verified, their devices, and the families that they are used
    for: all of the active backend, and those products of Triton that were tried."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        try:
            backend = _C.choose("amp_ext", device.partition(":")[0])
        except (NotImplementedError, RuntimeError):
            continue
        if backend == "library":
            continue
        if device != "cpu" or backend not in ("cpu", "triton"):
            yield backend, device, families_of(backend, device)
        if device != "cpu" and backend != "triton" and (tried := results("triton", device)):
            yield "triton", device, tuple(family for family in FAMILIES if family in tried)


def families_of(backend: str, device: str) -> tuple[str, ...]:
    """Those of products are of the kernels that compute them on the device."""
    kernels = gemm_kernels(backend, device)
    products = PRODUCTS if kernels is None else tuple(f"gemm_{kernel}_" for kernel in kernels)
    return tuple(
        family for family in FAMILIES if family[:4] != "gemm" or family.startswith(products)
    )


# ---- the record --------------------------------------------------------------------------------


def results(backend: str, device: str) -> dict[str, Result]:
    """What is known of each family."""
    identity = _identity(backend, device)
    name = _record_name(identity)
    if name not in _records:
        _records[name] = _read(identity)
    return _records[name]


def _read(identity: dict[str, Any]) -> dict[str, Result]:
    record = _cache.read(_record_name(identity))
    try:
        same = record is not None and record["identity"] == identity
        return {k: Result(**v) for k, v in record["results"].items()} if same else {}
    except (AttributeError, KeyError, TypeError):
        return {}


def _remember(backend: str, family: str, device: str, result: Result) -> None:
    known, identity = results(backend, device), _identity(backend, device)
    with _cache.locked():
        known |= _read(identity) | {family: result}
        record = {name: each._asdict() for name, each in known.items()}
        _cache.write(_record_name(identity), {"identity": identity, "results": record})


def _record_name(identity: dict[str, Any]) -> str:
    return f"verified-{zlib.crc32(json.dumps(identity).encode()):08x}"


@functools.cache
def _identity(backend: str, device: str) -> dict[str, Any]:
    """All that a result depends on."""
    return {
        "backend": backend,
        "device": _name_of(device),
        "driver": _driver(),
        "amp_ext": amp_ext.__version__,
        "code": fingerprint(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version() if backend == "triton" else None,
    }


def _name_of(device: str) -> str:
    if device == "cpu":
        return "emulated"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"


def _driver() -> str:
    """The version of NVIDIA's driver, where Linux tells it."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"


# ---- the comparison ----------------------------------------------------------------------------


def verify_family(backend: str, family: str, device: str) -> Result | None:
    """Compares all cases, whatever the record says, and remembers the result.

    None where there is none: there is too little memory, a graph is being captured, or the device
    has an error of before; or the kernels cannot run in this process, as for want of a compiler.
    """
    outcome: list[Result | None] = []
    _unusable.pop((backend, family, device), None)

    def work() -> None:
        outcome.append(_outcome_of(backend, family, torch.device(device)))

    # A thread of its own has none of the caller's modes: autocast, inference, default device,
    # stream, dispatch keys.
    thread = threading.Thread(target=work, name="amp_ext verification", daemon=True)
    thread.start()
    thread.join()
    if outcome[0] is not None:
        _remember(backend, family, device, outcome[0])
    return outcome[0]


def _outcome_of(backend: str, family: str, device: torch.device) -> Result | None:
    what, failure = family, ""
    is_gpu = device.type == "cuda"
    # Copies wait for the device, which a mode of the whole process may forbid.
    sync_mode = torch.cuda.get_sync_debug_mode() if is_gpu else 0
    try:
        if sync_mode:
            torch.cuda.set_sync_debug_mode(0)
        if is_gpu:
            torch.cuda.set_device(device)
        _C.put_under_test(backend, sm80="sm90" not in family, sm90="sm80" not in family)
        torch.set_flush_denormal(False)
        if _has_failed(device):
            return None
        for case in cases(family, backend):
            what = f"{case.op}, {case.what}"
            _compare(case, device)
    except WrongResult as error:
        failure = f"{what}: {error}"
    except Exception as error:  # whatever it is, training goes on with torch's ops
        if any(words in str(error) for words in ("out of memory", "is capturing")):
            return None
        failure = f"{what}: {error}"
        if not _has_failed(device):
            _unusable[backend, family, str(device)] = failure
            return None
    finally:
        if sync_mode:
            torch.cuda.set_sync_debug_mode(sync_mode)
    return Result(failure, time.strftime("%Y-%m-%d"))


def _has_failed(device: torch.device) -> bool:
    """Whether a kernel has ended this process's use of the device."""
    try:
        if device.type == "cuda":
            # Not the device, which would end another thread's capture.
            torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        return True
    return False


def _compare(case: Case, device: torch.device) -> None:
    """Raises WrongResult where results differ, or what the arguments' memory holds afterwards."""
    expected = _outcome(reference, case, CPU)
    for plan in case.plans or ((None,),):
        _C.force_gemm_tile(*plan)
        actual = _copy(_outcome(ops, case, device), CPU)
        names, ours = zip(*tree_flatten_with_path(actual)[0], strict=True)
        tensors = [
            (f"{name[0].key}{keystr(name[1:])}", one, other)
            for name, one, other in zip(names, ours, tree_leaves(expected), strict=True)
            if isinstance(one, Tensor)
        ]
        for name, one, other in tensors:
            _expect_equal(name, one, other, case)
            one.copy_(other)
        for name, one, other in tensors:
            if not torch.equal(_memory(one), _memory(other)):
                raise WrongResult(f"the memory around {name} is not as it was")


def _outcome(module: Any, case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments after a call, and its result."""
    arguments = call = _copy(case.arguments, device)
    if case.parts and module is ops:
        parts = [name for name, value in call.items() if isinstance(value, list)]
        call = {**call, **{name: list(call[name][0].split(case.parts)) for name in parts}}
    return {**arguments, "result": getattr(module, case.op)(**call)}


def _expect_equal(name: str, actual: Tensor, expected: Tensor, case: Case) -> None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise WrongResult(f"{name} is {actual.dtype} of shape {list(actual.shape)}")
    if torch.equal(actual, expected):
        return
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if case.tolerance:
        size = expected.double().abs().clamp(min=1)
        same |= (actual.double() - expected.double()).abs() <= case.tolerance * size
    if not same.all():
        index = (~same).nonzero()[0].tolist()
        ours, theirs = actual[tuple(index)].item(), expected[tuple(index)].item()
        raise WrongResult(f"element {index} of {name} is {ours}, expected {theirs}")


def _copy(value: Any, device: torch.device) -> Any:
    """A copy of tensors and what holds them on a device, with all memory that they are views of."""
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
    """The bytes of the memory that it is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


# ---- the command -------------------------------------------------------------------------------


def state(backend: str, family: str, device: str) -> str:
    """In a few words, whether a family has been verified."""
    result = results(backend, device).get(family)
    if result is None:
        return "not yet verified"
    return f"{'FAILED' if result.failure else 'verified'} on {result.day}"


def main() -> int:
    """Verifies every family of the active backends on all devices; 1 where one is wrong."""
    wrong = False
    for backend, device, families in verified_backends():
        print(f"\n{backend} on {device}, {_name_of(device)}, driver {_driver()}")
        for family in families:
            start = time.perf_counter()
            result = verify_family(backend, family, device)
            seconds = time.perf_counter() - start
            if result is None:
                reason = _unusable.get((backend, family, device), "too little memory")
                words = f"not verified: {reason}"
            else:
                words = result.failure or "ok"
            wrong |= words != "ok"
            print(f"  {family:<13} {seconds * 1e3:6.0f} ms  {'FAIL  ' * (words != 'ok')}{words}")
    if not any(verified_backends()):
        print("\nnothing to verify: no GPU kernels are in use here")
    return int(wrong)
