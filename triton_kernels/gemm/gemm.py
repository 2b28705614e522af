"""gemm: matrix products with fused epilogues."""

from __future__ import annotations

import functools
import os

import torch
from amp_ext.triton_kernels.gemm.launches import Launches, launches
from amp_ext.triton_kernels.gemm.plan import INTERPRETED_DEVICE, Device, candidates
from amp_ext.triton_kernels.gemm.product import Product, matrices
from amp_ext.triton_kernels.numerics import INTERPRETED
from torch import Tensor

AUTOTUNE = os.environ.get("AMP_EXT_TRITON_AUTOTUNE") == "1"


def gemm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    aux: Tensor | None,
    column_sums: Tensor | None,
    terms: int,
    alpha: float,
    beta: float,
    activation: str,
    derivative: bool,
) -> None:
    """x = alpha * A @ B + beta * c + bias in fp32; out = act(x), or x * act'(aux).

    Args:
        out: fp16, bf16 or fp32, [batch, m, n], column stride 1.
        a, b: fp16 or bf16, both the same; [batch * terms, m, k] and [batch * terms, k, n], any
            strides. One of batch and terms is 1.
        c: floating, [batch, m, n], any strides; may be out itself.
        bias: floating, [n], any stride.
        aux: [batch, m, n], column stride 1: with `derivative` floating, what act' is taken of;
            without, x is written to it.
        column_sums: fp32, [n]: receives the sums of the unrounded results of each column.
        terms: products that are summed in each matrix of out.
        activation: "none", "relu", "gelu" or "gelu_tanh".
    """
    if out.numel() == 0:
        if column_sums is not None:
            column_sums.zero_()
        return
    product = Product(
        out=matrices(out),
        a=matrices(a),
        b=matrices(b),
        c=None if c is None else matrices(c),
        aux=None if aux is None else matrices(aux),
        has_column_sums=column_sums is not None,
        batch=out.shape[0],
        terms=terms,
        activation=activation,
        derivative=derivative,
    )
    values = {
        "out": out,
        "a": a,
        "b": b,
        "c": c,
        "bias": None if bias is None else bias.contiguous(),
        "aux": aux,
        "column_sums": column_sums,
        "alpha": alpha,
        "beta": beta,
    }
    device = INTERPRETED_DEVICE if INTERPRETED else _device(out.device.index)
    if AUTOTUNE and not INTERPRETED:
        from amp_ext.triton_kernels.gemm.autotune import fastest

        fastest(product, device, values).run(values)
    else:
        planned(product, device).run(values)


@functools.lru_cache(maxsize=1024)
def planned(product: Product, device: Device) -> Launches:
    """Return what is predicted to be the fastest."""
    return launches(product, candidates(product.problem(device.has_tma), device)[0], device)


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        capability=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
