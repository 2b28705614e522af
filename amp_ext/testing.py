"""Inputs shared by tests, benchmarks and ``python -m amp_ext``: arguments of every op, and gradient
lists as training produces them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Shape = int | Sequence[int]


def arguments(op: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """An example of an op's arguments: valid, and with results that every backend has bit by bit.

    Args:
        op: its name in `amp_ext.ops`.
        device: where the tensors lie.

    Returns:
        New tensors and numbers, by parameter; none of the tensors is left out.
    """

    def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.arange(math.prod(shape), device=device).remainder(5).sub(2.0).view(shape)

    x, weight, bias, sums = integers(2, 3, 4), integers(5, 4).half(), integers(5), integers(2, 3, 5)
    relu, operands = {"activation": "relu"}, {"a": x, "b": weight, "trans_b": True}
    scaled = {"alpha": 2.0, "beta": -1.0, "out_dtype": torch.float32}
    gemm = {**operands, "c": integers(3, 1).double(), "bias": bias, **scaled, **relu}
    grads = [full(4.0, 19), full(2.0, 2, 4, dtype=torch.float16).t(), full(12.0).double()]
    checked = {"grads": grads, "found_inf": full(0.0), "inv_scale": full(0.5)}
    return {
        "unscale_": {**checked, "norm": full(3.0), "max_norm": 2.0},
        "check_finite": {"grads": [*grads, full(math.inf)], "found_inf": full(0.0)},
        "grad_norm": {**checked, "norms": full(0.0, 3)},
        "update_scale_": {
            "scale": full(4.0),
            "growth_tracker": full(0, dtype=torch.int32),
            "found_infs": [full(0.0), full(1.0), full(0.0)],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1,
            "hysteresis": 2,
            "hysteresis_tracker": full(1, dtype=torch.int32),
            "skipped_steps": full(0, dtype=torch.int64),
        },
        "cast_": {
            "outputs": [torch.zeros_like(grad, dtype=torch.bfloat16) for grad in grads],
            "inputs": grads,
        },
        "gemm": gemm,
        "gemm_with_aux": gemm,
        "gemm_times_derivative": {**operands, "aux": sums.half(), **relu},
        "gemm_accumulate_": {"c": sums, **operands, "alpha": 2.0},
        "linear": {"x": x, "weight": weight, "bias": bias, **relu},
        "mlp": {
            **{"x": x, "weight1": weight, "bias1": bias},
            **{"weight2": integers(5, 5).half(), "bias2": bias.clone(), **relu},
        },
    }[op]


def gradient(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    layout: str = "contiguous",
    generator: torch.Generator | None = None,
) -> Tensor:
    """One gradient of training-like scale: sigma * N(0, 1), log10(sigma) uniform in [-4, -1].

    No element is zero or subnormal: magnitudes are raised to the smallest normal number of `dtype`,
    so that doubling a gradient and halving it again is exact.

    Args:
        shape: number of elements of a 1-D gradient, or a shape.
        dtype: float16, bfloat16, float32 or float64.
        device: where the gradient lies; the values are drawn there.
        layout: "contiguous"; "channels_last" (4-D shapes only); "strided", every second element of
            wider rows; "misaligned", dense but starting one element after an aligned address.
        generator: source of the values, on `device`.

    Raises:
        ValueError: `layout` is none of the four.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    sigma = 10 ** (-4 + 3 * torch.rand((), device=device, generator=generator))
    values = torch.randn(shape, device=device, generator=generator).mul_(sigma).to(dtype)
    values = torch.copysign(values.abs().clamp_(min=torch.finfo(dtype).tiny), values)
    if layout == "contiguous":
        return values
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return values.new_empty(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(values)
    if layout == "misaligned":
        return values.new_empty(values.numel() + 1)[1:].view(shape).copy_(values)
    raise ValueError(
        f"layout must be 'contiguous', 'channels_last', 'strided' or 'misaligned', got {layout!r}"
    )


def gradients(
    shapes: Iterable[Shape],
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    device: torch.device | str = "cpu",
    *,
    layout: str = "contiguous",
    seed: int = 0,
) -> list[Tensor]:
    """A list of gradients (see `gradient`), one a shape; several dtypes are dealt out in turn."""
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    return [
        gradient(shape, dtypes[i % len(dtypes)], device, layout=layout, generator=generator)
        for i, shape in enumerate(shapes)
    ]


def parameters(grads: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    """Leaf parameters, values N(0, 1), whose .grad are the given tensors themselves."""
    leaves = []
    for grad in grads:
        leaf = torch.nn.Parameter(torch.randn_like(grad))
        leaf.grad = grad
        leaves.append(leaf)
    return leaves


def gpt2_small_shapes(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, positions: int = 1024
) -> list[Shape]:
    """Parameter shapes of GPT-2: 4 + 12 * layers tensors, 124,439,808 elements by default.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; the output
    embedding is the input embedding.
    """
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *mlp]
    return [(vocabulary, width), (positions, width), *(layers * block), *norm]
