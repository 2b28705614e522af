"""Which backend runs an op on a device, and why; and the choice of one."""

import os
from typing import NamedTuple

import torch

from amp_ext._library import _C, CUDA_ARCHES, REBUILD
from amp_ext._triton import is_interpreted, triton_version, why_not_triton
from amp_ext.ops import GEMM_OPS, LIST_OPS

OPS = (*LIST_OPS, *GEMM_OPS)
BACKENDS = ("cuda", "triton", "cpu")
GEMM_MODES = ("auto", "kernel", "library")

_REBUILD = f"FORCE_CUDA=1 {REBUILD}"
_VARIABLE = "AMP_EXT_BACKEND"
_GEMM_VARIABLE = "AMP_EXT_GEMM"


class Backend(NamedTuple):
    """What runs an op.

    Attributes:
        name: "cpu", "cuda" or "triton", this package's code for the device; "library", torch's; or
            "none", where tensors of the device are refused.
        reason: why it is this one, in a few words.
    """

    name: str
    reason: str


# ---- the choice --------------------------------------------------------------------------------


def set_backend(name: str | None) -> None:
    """Chooses the backend of the devices that it supports, in the whole process, from now on.

    For others the choice is amp_ext's own, as with None: the CPU's backend for CPU tensors; for
    CUDA tensors the CUDA kernels where they were built, else the Triton kernels where Triton is
    installed. When amp_ext is imported, the environment variable ``AMP_EXT_BACKEND`` chooses. Which
    products it computes is a matter of ``AMP_EXT_GEMM`` (docs/kernels.md); a backend that is named
    excludes the kernels of others, even if :func:`amp_ext.tune` has measured them to be faster.

    Args:
        name: "cuda", the CUDA kernels of this build; "triton"; "cpu"; or None. The Triton kernels
            take CUDA tensors, or, where ``TRITON_INTERPRET=1`` was set before Triton was imported,
            CPU tensors instead: slowly, and in one thread at a time.

    Raises:
        ValueError: another name.
        RuntimeError: a backend that is not here, with what has to be installed. Nothing is changed.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"set_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "cuda" and not _C.cuda_built():
        before = "" if torch.version.cuda else "install a CUDA build of torch, then "
        raise RuntimeError(
            f"set_backend: the cuda backend was not built; {before}rebuild amp_ext with: {_REBUILD}"
        )
    if name == "triton" and (reason := why_not_triton()):
        raise RuntimeError(f"set_backend: the triton backend cannot be used: {reason}")
    global _chosen
    _chosen = name
    by_default = name != "cuda" and not _C.cuda_built() and not why_not_triton()
    # The interpreter reads and writes the host's memory.
    triton = (name == "triton" or by_default) and not is_interpreted()
    _C.use_backend("cuda", "triton" if triton else "cuda" if name == "cuda" else "")
    _C.use_backend("cpu", "triton" if name == "triton" and is_interpreted() else "")


def get_backend() -> str | None:
    """What :func:`set_backend` or ``AMP_EXT_BACKEND`` has chosen; None where nobody has."""
    return _chosen


def _choose_by_environment() -> None:
    """Raises ImportError, since it is the import that fails."""
    name = os.environ.get(_VARIABLE) or None
    try:
        set_backend(name)
    except (RuntimeError, ValueError) as error:
        raise ImportError(f"amp_ext, {_VARIABLE}={name}: {error}") from None
    mode = os.environ.get(_GEMM_VARIABLE) or "auto"
    if mode not in GEMM_MODES:
        modes = f"{', '.join(GEMM_MODES[:-1])} or {GEMM_MODES[-1]}"
        raise ImportError(f"amp_ext: {_GEMM_VARIABLE} must be {modes}, got {mode!r}")
    _C.set_gemm_mode(mode)


_chosen: str | None = None
_choose_by_environment()


# ---- what it comes to --------------------------------------------------------------------------


def backend_for(device_type: str, op: str) -> Backend:
    """What runs ``op`` (a name in OPS) on the devices of a type."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    try:
        name = _C.choose(f"amp_ext::{op}", device_type)
    except NotImplementedError as error:
        return Backend("none", str(error))
    except RuntimeError as error:
        name, obstacle = "none", str(error).removeprefix(f"amp_ext::{op}: ")
    if op in GEMM_OPS:
        return _products(device_type, name)
    if name == "triton":
        return Backend(name, _triton_kernels(device_type))
    if name == "cpu":
        return Backend(name, f"C++ on torch's threads, {torch.backends.cpu.get_cpu_capability()}")
    if name == "cuda":
        return Backend(name, f"CUDA kernels for {', '.join(CUDA_ARCHES)}")
    return Backend(name, f"{why_not_triton() or 'TRITON_INTERPRET is set'}; {obstacle}")


def _triton_kernels(device_type: str) -> str:
    interpreted = device_type == "cpu"
    how = "interpreted" if interpreted else "which compiles kernels when they are first used"
    return f"Triton {triton_version()}, {how}"


def _products(device_type: str, name: str) -> Backend:
    mode = _C.gemm_mode()
    no_kernels = name == "cuda" and _has_no_kernels()
    if name in ("cuda", "triton") and mode == "kernel" and not no_kernels:
        kernels = _triton_kernels(device_type) if name == "triton" else "CUDA kernels"
        others = "the CPU's backend" if device_type == "cpu" else "torch's GEMM"
        return Backend(name, f"{kernels}, for FP16 and BF16; other operands by {others}")
    measured = "what amp_ext.tune() has measured to be the fastest; else "
    if mode != "auto":
        measured = ""
    if device_type == "cpu":
        reason = f"{measured}FP32 sums: small products here, large ones by torch's FP32 GEMM"
        native = [
            name
            for name, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16))
            if _C.multiplies(dtype)
        ]
        if native:
            names = " and ".join(native)
            reason += f"; {names} by torch's library, which uses the processor's instructions"
        return Backend("cpu", reason)
    reason = f"{measured}torch's GEMM with FP32 weight gradients"
    if no_kernels:
        reason += "; the CUDA kernels compute no products on this GPU"
    elif name != "none":
        reason += f"; {_GEMM_VARIABLE}=kernel turns on our own kernels, not measured yet"
    return Backend("library", reason)


def gemm_kernels(backend: str, device: str) -> tuple[str, ...] | None:
    """Return the names of a backend's kernels for products on a device.

    None where a backend has no names for them, and on a GPU that cannot be used.
    """
    try:
        return _C.gemm_kernels(backend, device)
    except RuntimeError:  # the doctor's checks show why
        return None


def _has_no_kernels() -> bool:
    """Return whether there are GPUs, and the CUDA kernels compute products on none of them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kernels = [gemm_kernels("cuda", f"cuda:{index}") for index in range(gpus)]
    return gpus > 0 and all(names is not None and not names for names in kernels)
