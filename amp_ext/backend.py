"""Which backend serves an op on a device, and why."""

from typing import NamedTuple

import torch

from amp_ext import _build_info
from amp_ext._library import _C, REBUILD

LIST_OPS = (
    "unscale_",
    "check_finite",
    "grad_norm",
    "update_scale_",
    "grad_norm_update_scale_",
    "cast_",
)
GEMM_OPS = (
    *("gemm", "gemm_with_aux", "gemm_times_derivative", "gemm_accumulate_"),
    *("linear", "mlp"),
)
OPS = LIST_OPS + GEMM_OPS

_REBUILD = f"FORCE_CUDA=1 {REBUILD}"


class Backend(NamedTuple):
    """What serves an op.

    Attributes:
        name: "cpu" or "cuda", this package's code for the device; "library", torch's; or "none",
            where tensors of the device are refused.
        reason: why it is this one, in a few words.
    """

    name: str
    reason: str


def backend_for(device_type: str, op: str) -> Backend:
    """What serves ``op`` (a name in OPS) on the devices of a type."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if device_type == "cpu" and op in GEMM_OPS:
        reason = "FP32 sums: small products here, large ones by torch's FP32 GEMM"
        if _C.multiplies_bf16():
            reason += "; BF16 into BF16 by torch's own, which uses the processor's instructions"
        return Backend("cpu", reason)
    if device_type == "cpu":
        return Backend("cpu", f"C++ on torch's threads, {torch.backends.cpu.get_cpu_capability()}")
    if device_type == "cuda" and op in GEMM_OPS:
        return _cuda_gemm()
    if device_type == "cuda" and _C.cuda_built():
        return Backend("cuda", f"CUDA kernels for {', '.join(_build_info.CUDA_ARCHES)}")
    if device_type == "cuda":
        return Backend("none", "built without CUDA kernels; rebuild with: " + _REBUILD)
    return Backend("none", "amp_ext serves CPU and CUDA tensors")


def _cuda_gemm() -> Backend:
    if not _C.cuda_built():
        return Backend("library", "torch's GEMM with FP32 weight gradients")
    if _C.uses_cuda_gemm():
        return Backend("cuda", "CUDA kernels for FP16 and BF16; torch's GEMM for other operands")
    return Backend(
        "library",
        "torch's GEMM with FP32 weight gradients; AMP_EXT_GEMM=kernel turns on our own kernels, "
        "which have not been measured yet",
    )
