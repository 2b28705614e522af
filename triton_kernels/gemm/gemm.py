"""gemm: matrix products with fused epilogues."""

from __future__ import annotations

import functools

import torch
from amp_ext.triton_kernels.gemm.launches import Launches, launches
from amp_ext.triton_kernels.gemm.plan import INTERPRETED_DEVICE, Device, candidates
from amp_ext.triton_kernels.gemm.product import Product, matrices
from amp_ext.triton_kernels.numerics import INTERPRETED
from torch import Tensor


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
    variant: int,
) -> Launches:
    """x = alpha * A @ B + beta * c + bias in fp32; out = act(x), or x * act'(aux).

    Args:
        out: fp16, bf16 or fp32, [batch, m, n], column stride 1; not empty.
        a, b: fp16 or bf16, both the same; [batch * terms, m, k] and [batch * terms, k, n], any
            strides. One of batch and terms is 1.
        c: floating, [batch, m, n], any strides; may be out itself.
        bias: floating, [n], stride 1.
        aux: [batch, m, n], column stride 1: with `derivative` floating, what act' is taken of;
            without, x is written to it.
        column_sums: fp32, [n]: receives the sums of the unrounded results of each column.
        terms: products that are summed in each matrix of out.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        variant: the number of the plan, in the order of their predicted times.

    Returns:
        The launches, which compute any product that differs in nothing but alpha, beta and
        addresses, and in these not in whether they are multiples of 16.
    """
    product = Product(
        out=matrices(out),
        a=matrices(a),
        b=matrices(b),
        c=None if c is None else matrices(c),
        aux=None if aux is None else matrices(aux),
        bias=None if bias is None else bias.dtype,
        has_column_sums=column_sums is not None,
        batch=out.shape[0],
        terms=terms,
        activation=activation,
        derivative=derivative,
    )
    device = INTERPRETED_DEVICE if INTERPRETED else _device(out.device.index)
    tensors = (out, a, b, c, bias, aux, column_sums)
    if INTERPRETED:
        tensors = _with_one_storage_per_address(tensors)
    found = planned(product, device, variant)
    found.run_first((*tensors, alpha, beta))
    return found


def planned(product: Product, device: Device, variant: int) -> Launches:
    """Return the launches of a plan, the last one's if there are fewer plans."""
    plans = candidates(product.problem(device.has_tma), device)
    return launches(product, plans[min(variant, len(plans) - 1)], device)


def _with_one_storage_per_address(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Return the tensors as views of the largest storage where several begin at one address, which
    the interpreter takes for the same.
    """
    storages = [x.untyped_storage() for x in tensors if x is not None]
    storages.sort(key=lambda storage: storage.nbytes())
    largest = {storage.data_ptr(): storage for storage in storages}
    return [
        None if x is None else x.new_empty(0).set_(largest[x.data_ptr()], 0, x.shape, x.stride())
        for x in tensors
    ]


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        capability=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
