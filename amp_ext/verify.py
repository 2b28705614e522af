"""Compares a GPU's kernels with the reference before they are first used, and remembers the result.

A family is what is verified apart from the rest: an op on lists, or the products of one operand
type, by one backend on one kind of device. ``python -m amp_ext verify`` runs all of them.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

import amp_ext
from amp_ext import _cache, ops, reference
from amp_ext._library import _C
from amp_ext._triton import triton_version
from amp_ext._verify_cases import FAMILIES, Case, cases

CPU = torch.device("cpu")


class Result(NamedTuple):
    """What came of a comparison.

    Attributes:
        failure: what differs; empty where nothing does.
        day: of the comparison.
    """

    failure: str
    day: str


_lock = threading.Lock()
_records: dict[str, dict[str, Result]] = {}  # what has been read or written, by name
_warned: set[tuple[str, str, str]] = set()


# ---- the answer --------------------------------------------------------------------------------


def is_on() -> bool:
    return os.environ.get("AMP_EXT_VERIFY") != "0"


def is_right(backend: str, family: str, device: str) -> bool | None:
    """Whether a backend may run the calls of a family; None where that is unknown for now.

    Reads the record, or compares. Called where a backend is chosen (verified.cpp).
    """
    if not is_on():
        return True
    with _lock:
        result = results(backend, device).get(family) or verify_family(backend, family, device)
    if result is None:
        return None
    if result.failure and (backend, family, device) not in _warned:
        _warned.add((backend, family, device))
        warnings.warn(
            f"amp_ext: the {backend} kernels of {family} did not pass their verification on "
            f"{device} ({_name_of(device)}): {result.failure}. torch's own ops run in their place. "
            "Please report what `python -m amp_ext verify` prints; it also tries again.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not result.failure


def verified_backends() -> Iterator[tuple[str, str]]:
    """The backends that are active here and have to be verified, and their devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        try:
            backend = _C.choose("amp_ext", device.partition(":")[0])
        except (NotImplementedError, RuntimeError):
            continue
        if device != "cpu" or backend not in ("cpu", "triton"):
            yield backend, device


# ---- the record --------------------------------------------------------------------------------


def results(backend: str, device: str) -> dict[str, Result]:
    """What is known of each family."""
    identity = _identity(backend, device)
    name = _record_name(identity)
    if name not in _records:
        record = _cache.read(name)
        try:
            same = record is not None and record["identity"] == identity
            known = {k: Result(**v) for k, v in record["results"].items()} if same else {}
        except (AttributeError, KeyError, TypeError):
            known = {}
        _records[name] = known
    return _records[name]


def _remember(backend: str, family: str, device: str, result: Result) -> None:
    results(backend, device)[family] = result
    identity = _identity(backend, device)
    known = {k: v._asdict() for k, v in results(backend, device).items()}
    _cache.write(_record_name(identity), {"identity": identity, "results": known})


def _record_name(identity: dict[str, Any]) -> str:
    return f"verified-{zlib.crc32(json.dumps(identity).encode()):08x}"


def _identity(backend: str, device: str) -> dict[str, Any]:
    """All that a result depends on."""
    files = [Path(_C.__file__)]
    if backend == "triton":
        for folder in find_spec("amp_ext.triton_kernels").submodule_search_locations:
            files += sorted(Path(folder).rglob("*.py"))
    code = json.dumps([(file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    return {
        "backend": backend,
        "device": _name_of(device),
        "driver": _driver(),
        "amp_ext": amp_ext.__version__,
        "code": f"{zlib.crc32(code.encode()):08x}",
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
    """Compares all cases, whatever the record says, and remembers the result; None where there is
    too little memory for them, or a graph is being captured.
    """
    outcome: list[str | None] = []

    def work() -> None:
        what = family
        try:
            _C.put_under_test(backend)
            where = torch.device(device)
            if where.type == "cuda":
                torch.cuda.set_device(where)
            torch.set_flush_denormal(False)
            sm90 = where.type == "cuda" and torch.cuda.get_device_capability(where) == (9, 0)
            for case in cases(family, backend, sm90):
                what = f"{case.op}, {case.what}"
                _compare(case, where)
        except Exception as error:  # whatever it is, training goes on with torch's ops
            no_answer = any(words in str(error) for words in ("out of memory", "is capturing"))
            outcome.append(None if no_answer else f"{what}: {error}")
        else:
            outcome.append("")

    # A thread of its own has none of the caller's modes: autocast, inference, default device,
    # stream, dispatch keys.
    thread = threading.Thread(target=work, name="amp_ext verification", daemon=True)
    thread.start()
    thread.join()
    (failure,) = outcome
    if failure is None:
        return None
    result = Result(failure, time.strftime("%Y-%m-%d"))
    _remember(backend, family, device, result)
    return result


def _compare(case: Case, device: torch.device) -> None:
    """Raises ValueError where results differ, or what the arguments' memory holds afterwards."""
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
            _expect_equal(name, one, other, case.tolerance)
            one.copy_(other)
        for name, one, other in tensors:
            if not torch.equal(_memory(one), _memory(other)):
                raise ValueError(f"the memory around {name} is not as it was")


def _outcome(module: Any, case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments after a call, and its result."""
    arguments = call = _copy(case.arguments, device)
    if case.parts and module is ops:
        parts = [name for name, value in call.items() if isinstance(value, list)]
        call = {**call, **{name: list(call[name][0].split(case.parts)) for name in parts}}
    return {**arguments, "result": getattr(module, case.op)(**call)}


def _expect_equal(name: str, actual: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise ValueError(f"{name} is {actual.dtype} of shape {list(actual.shape)}")
    if torch.equal(actual, expected):
        return
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if tolerance:
        same |= (actual - expected).abs() <= tolerance * expected.abs().clamp(min=1)
    if not same.all():
        index = (~same).nonzero()[0].tolist()
        ours, theirs = actual[tuple(index)].item(), expected[tuple(index)].item()
        raise ValueError(f"element {index} of {name} is {ours}, expected {theirs}")


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
    for backend, device in verified_backends():
        print(f"\n{backend} on {device}, {_name_of(device)}, driver {_driver()}")
        for family in FAMILIES:
            start = time.perf_counter()
            result = verify_family(backend, family, device)
            seconds = time.perf_counter() - start
            words = "not verified: out of memory" if result is None else result.failure or "ok"
            wrong |= words != "ok"
            print(f"  {family:<13} {seconds * 1e3:6.0f} ms  {'FAIL  ' * (words != 'ok')}{words}")
    if not any(verified_backends()):
        print("\nnothing to verify: no GPU kernels are in use here")
    return int(wrong)
