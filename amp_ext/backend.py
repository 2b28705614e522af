"""Choose the backend of a device, and report the backend of an op."""

import os
from typing import NamedTuple

import torch

from amp_ext._library import _C, CUDA_ARCHES, REBUILD
from amp_ext._triton import is_interpreted, triton_version, why_not_triton

BACKENDS = ("cuda", "triton", "cpu")


class Backend(NamedTuple):
    """Describe the code that runs an op.

    Attributes:
        name: "cpu", "cuda" or "triton", this package's code for the device; "library", torch's; or
            "none", where tensors of the device are refused.
        reason: the reason for the choice, in a few words.
    """

    name: str
    reason: str


def set_backend(name: str | None) -> None:
    """Choose the backend of the devices that it supports, for the whole process.

    For other devices, and with None, amp_ext chooses: the CPU's backend for CPU tensors; for CUDA
    tensors the CUDA kernels if they were built, else the Triton kernels if Triton is installed.
    When amp_ext is imported, the environment variable ``AMP_EXT_BACKEND`` chooses.

    ``AMP_EXT_GEMM`` selects the products that the backend computes (docs/kernels.md). A named
    backend excludes the kernels of others, even if :func:`amp_ext.tune` has measured them to be
    faster, except Triton kernels in place of CUDA kernels that are wrong (docs/kernels.md).

    Args:
        name: "cuda", the CUDA kernels of this build; "triton"; "cpu"; or None. The Triton kernels
            take CUDA tensors. If ``TRITON_INTERPRET=1`` was set before Triton was imported, they
            take CPU tensors instead: slowly, and in one thread at a time.

    Raises:
        ValueError: another name.
        RuntimeError: the backend is not here; the error names the package or the build to install.
            Nothing has changed then.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"set_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "cuda" and not _C.cuda_built():
        before = "" if torch.version.cuda else "install a CUDA build of torch, then "
        raise RuntimeError(
            f"set_backend: the cuda backend was not built; {before}rebuild amp_ext with: "
            f"FORCE_CUDA=1 {REBUILD}"
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
    """Return the name chosen by :func:`set_backend` or ``AMP_EXT_BACKEND``, or None."""
    return _chosen


_chosen: str | None = None
try:
    set_backend(os.environ.get("AMP_EXT_BACKEND") or None)
    _C.set_gemm_mode(os.environ.get("AMP_EXT_GEMM") or "auto")
except (RuntimeError, ValueError) as error:
    raise ImportError(f"amp_ext, AMP_EXT_BACKEND or AMP_EXT_GEMM: {error}") from None


def backend_for(device_type: str) -> Backend:
    """Return the backend of the ops on lists for a device type."""
    try:
        name = _C.choose("amp_ext", device_type)
    except NotImplementedError as error:
        return Backend("none", str(error))
    except RuntimeError as error:
        obstacle = str(error).removeprefix("amp_ext: ")
        return Backend("none", f"{why_not_triton() or 'TRITON_INTERPRET is set'}; {obstacle}")
    if name == "triton":
        how = "interpreted" if device_type == "cpu" else "compiled at each kernel's first use"
        return Backend(name, f"Triton {triton_version()}, {how}")
    if name == "cpu":
        return Backend(name, f"C++ on torch's threads, {torch.backends.cpu.get_cpu_capability()}")
    return Backend(name, f"CUDA kernels for {', '.join(CUDA_ARCHES)}")


def product_choices(device: str) -> list[tuple[str, Backend]]:
    """Return the backend of matrix products by operands, with the reason.

    The products are A @ B of square matrices of one dtype, small and large ones.
    """
    choices: list[tuple[str, Backend]] = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        sizes: dict[Backend, list[str]] = {}
        for size in (16, 1024):
            a = torch.empty(size, size, dtype=dtype, device=device)
            sizes.setdefault(Backend(*_C.Product(a, a).choose()), []).append(str(size))
        name = str(dtype).removeprefix("torch.")
        choices += [(f"{name}, {' and '.join(s)}", choice) for choice, s in sizes.items()]
    return choices
