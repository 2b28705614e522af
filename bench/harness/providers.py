"""Make the providers of a case: amp_ext's backends and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

import amp_ext
from amp_ext._library import _C
from harness.registry import BASELINE, Provider

LIBRARY = "library"  # amp_ext with products by torch's GEMM


@contextmanager
def _choice(backend: str | None, gemm_mode: str) -> Iterator[None]:
    """Choose a backend, and kernels or torch's library for products."""
    before = amp_ext.get_backend(), _C.gemm_mode()
    amp_ext.set_backend(backend)
    _C.set_gemm_mode(gemm_mode)
    try:
        yield
    finally:
        amp_ext.set_backend(before[0])
        _C.set_gemm_mode(before[1])


def ours(
    device: torch.device, products: bool = False
) -> dict[str, Callable[[], AbstractContextManager]]:
    """Return the backends of amp_ext that are here, by name, with their contexts.

    Args:
        device: a CPU has "cpu", a GPU "cuda" and "triton".
        products: add "library" on a GPU.
    """
    if device.type == "cpu":
        return {"cpu": nullcontext}
    from amp_ext._triton import triton_version

    found = {}
    if _C.cuda_built():
        found["cuda"] = lambda: _choice("cuda", "kernel")
    if triton_version():
        found["triton"] = lambda: _choice("triton", "kernel")
    if products:
        found[LIBRARY] = lambda: _choice(None, "library")
    return found


def lines(
    mine: Callable[..., Any],
    theirs: Callable[..., Any],
    device: torch.device,
    products: bool = False,
) -> list[Provider]:
    """Return a provider for each of amp_ext's backends, and the baseline."""
    made = [Provider(name, mine, around=each) for name, each in ours(device, products).items()]
    return [*made, Provider(BASELINE, theirs)]


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute FP32 products and convolutions in FP32 precision."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed
