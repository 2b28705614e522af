"""Make lists of gradients as training produces them, and parameters that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from workloads.networks import GPT2

Shape = int | Sequence[int]


def gradient(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Make a gradient of training-like scale: sigma * N(0, 1), log10(sigma) in [-4, -1].

    No element is zero or subnormal: magnitudes are raised to the smallest normal number of `dtype`,
    so that doubling a gradient and halving it again is exact.

    Args:
        shape: number of elements of a 1-D gradient, or a shape.
        dtype: float16, bfloat16, float32 or float64.
        device: where the gradient lies; the values are drawn there.
        generator: source of the values, on `device`.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    sigma = 10 ** (-4 + 3 * torch.rand((), device=device, generator=generator))
    values = torch.randn(shape, device=device, generator=generator).mul_(sigma).to(dtype)
    return torch.copysign(values.abs().clamp_(min=torch.finfo(dtype).tiny), values)


def gradients(
    shapes: Iterable[Shape],
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Make the same list every time, a gradient a shape; several dtypes take turns."""
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    generator = torch.Generator(device).manual_seed(0)
    return [
        gradient(shape, dtypes[i % len(dtypes)], device, generator)
        for i, shape in enumerate(shapes)
    ]


def parameters(grads: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    """Make leaf parameters with values N(0, 1) and the given tensors as .grad."""
    leaves = []
    for grad in grads:
        leaf = torch.nn.Parameter(torch.randn_like(grad))
        leaf.grad = grad
        leaves.append(leaf)
    return leaves


def gpt2_shapes(quick: bool) -> tuple[str, list[Shape]]:
    """Return the shapes of GPT-2 small under their name, scaled down when `quick`."""
    name, sizes = "GPT-2 small, 148 tensors", GPT2()
    if quick:
        name, sizes = "GPT-2 small at 1/32 width", GPT2(width=24, vocabulary=1571, positions=32)
    with torch.device("meta"):
        return name, [parameter.shape for parameter in sizes.network().parameters()]
