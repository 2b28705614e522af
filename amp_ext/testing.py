"""Inputs shared by the tests and the benchmarks: gradient lists as training produces them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Shape = int | Sequence[int]


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
