"""GEMMs with fused epilogues: from tensors to launches."""

from __future__ import annotations

import ctypes
import functools
import math
import os

import torch
from amp_ext.triton_kernels.gemm.launches import launches
from amp_ext.triton_kernels.gemm.product import LIMIT, Matrices, Product, read
from amp_ext.triton_kernels.gemm.plan import INTERPRETED_DEVICE, Device, Plan, Problem, candidates
from amp_ext.triton_kernels.numerics import INTERPRETED
from torch import Tensor

WORTH_A_COPY = 256
"""Uses of each element of an operand, from which on a copy that TMA takes is sooner ready than
loads of single elements. (Not under the interpreter, which is to see these.)
"""


def gemm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    aux: Tensor | None,
    column_sums: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    sum_batch: bool,
    alpha: float,
    beta: float,
    activation: str,
    derivative: bool,
) -> None:
    """x = alpha * A @ B + beta * c + bias in fp32; out = act(x), or x * act'(aux).

    Args:
        out: fp16, bf16 or fp32, [*, m, n], or [m, n] with sum_batch; row-major.
        a, b: fp16 or bf16, both the same, any strides; [*, m, k] and [*, k, n], or transposed.
            Leading dimensions are equal, or absent in one of the two.
        c: of out's shape, any floating dtype and strides; may be out itself.
        bias: [n], any floating dtype.
        aux: with `derivative`, what act' is taken of, any floating dtype and strides; without, x is
            written to it, which is like out.
        column_sums: fp32, [n]: receives the sums of the unrounded results of each column.
        trans_a, trans_b: whether a is [*, k, m], and b [*, n, k].
        sum_batch: whether the products are summed over the leading dimensions.
        alpha, beta: factors; with a beta of 0 c is not read.
        activation: "none", "relu", "gelu" or "gelu_tanh".
        derivative: see above.
    """
    if out.numel() == 0:
        if column_sums is not None:
            column_sums.zero_()
        return
    device = device_of(out)
    product = Product(
        a=read(a, trans_a),
        b=read(b, trans_b),
        out=read(out),
        c=None if c is None or beta == 0 else read(c),
        bias=None if bias is None else bias.contiguous(),
        aux=None if aux is None else read(aux),
        column_sums=column_sums,
        batch=math.prod(out.shape[:-2]),
        terms=math.prod(a.shape[:-2]) if sum_batch else 1,
        alpha=ctypes.c_float(alpha).value,
        beta=ctypes.c_float(beta).value,
        activation=activation,
        derivative=derivative,
    ).joined()
    if device.has_tma and not INTERPRETED:
        product = _for_tma(product)
    problem = product.problem(device.has_tma)
    plans = _possible(problem, candidates(problem, device))
    if len(plans) > 1 and os.environ.get("AMP_EXT_TRITON_AUTOTUNE") == "1":
        from amp_ext.triton_kernels.gemm.autotune import fastest

        plan = fastest(product, problem, plans, device)
    else:
        plan = plans[0]
    for launch in launches(product, plan, device):
        launch.run()


def _for_tma(p: Product) -> Product:
    """Return the product with copies of operands that are worth it."""

    def of(operand: Matrices, uses: int) -> Matrices:
        count = p.count(operand)
        worth = min(uses, operand.rows, operand.columns) >= WORTH_A_COPY
        return operand.aligned(count) if worth and not operand.stored(count) else operand

    return p._replace(a=of(p.a, uses=p.b.columns), b=of(p.b, uses=p.a.rows))


def _possible(problem: Problem, plans: tuple[Plan, ...]) -> list[Plan]:
    """Return the plans whose numbers the kernels can count."""
    possible = [plan for plan in plans if max(plan.units, plan.steps) <= LIMIT]
    if not possible or max(problem.m, problem.n, problem.k, problem.terms) > LIMIT:
        raise NotImplementedError(
            f"gemm: m, n, k, the number of products that are summed, and those of tiles and of "
            f"steps along k must be <= {LIMIT}, got a batch of {problem.batch} sums of "
            f"{problem.terms} products with m = {problem.m}, n = {problem.n}, k = {problem.k}"
        )
    return possible


def device_of(tensor: Tensor) -> Device:
    return INTERPRETED_DEVICE if INTERPRETED else _device(tensor.device.index)


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        capability=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
