"""What runs an op, as csrc/bindings/backends/choose.cpp has it, where there are torch's ops and the
Triton kernels to choose from."""

from __future__ import annotations

import threading

import torch

GEMM_MODES = ("auto", "measure", "kernel", "library")

_chosen = {"cpu": "", "cuda": ""}
_gemm_mode = "auto"


class _Thread(threading.local):
    under_test = ""


_thread = _Thread()


def use_backend(device_type: str, backend: str) -> None:
    """ "triton", or "" for torch's ops."""
    _chosen[device_type] = backend


def name(device: torch.device) -> str:
    return _thread.under_test or _chosen.get(device.type) or "library"


def choose(op: str, device_type: str) -> str:
    device = torch.device(device_type)
    if device.type not in _chosen:
        raise NotImplementedError(
            f"{op}: tensors must be on the CPU or a CUDA device, got {device_type}"
        )
    return name(device)


def put_under_test(backend: str) -> None:
    """Of the calls of this thread."""
    _thread.under_test = backend


def is_under_test() -> bool:
    return bool(_thread.under_test)


def set_gemm_mode(mode: str) -> None:
    if mode not in GEMM_MODES:
        raise ValueError(
            "amp_ext: how products are computed must be auto, measure, kernel or library, "
            f"got {mode}"
        )
    global _gemm_mode
    _gemm_mode = mode


def gemm_mode() -> str:
    return _gemm_mode


def cuda_built() -> bool:
    return False


def multiplies_bf16() -> bool:
    """Whether products of bfloat16 are the processor's own: here they are computed in float32."""
    return False
