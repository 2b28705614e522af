"""Compare results of 16-bit products and layers with exact ones in FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.registry import check

UNIT = 2.0**-24  # half a unit in the last place of float32
BLOCK = 128
ELEMENT = 8  # an element's bound relative to a block's


def block_norms(matrix: Tensor) -> Tensor:
    """Return the norms, in float64, of blocks of about BLOCK rows and columns."""
    sums = torch.atleast_2d(matrix).double().square()
    for dim in (0, 1):
        parts = sums.tensor_split(max(1, sums.shape[dim] // BLOCK), dim)
        sums = torch.cat([part.sum(dim, keepdim=True) for part in parts], dim)
    return sums.sqrt_()


def compare(result: Tensor, exact: Tensor, terms: int, dtype: torch.dtype, name: str) -> None:
    """Raise CheckError where a block or an element is further off than roundings explain.

    A block may be off by eps of the exact block's norm. One rounding to `dtype` is at most eps / 2
    of a value, and eps / sqrt(12) of the norm of random values. Products with random matrices keep
    that proportion. Errors of several roundings add up in quadrature: twelve of them give eps.
    A result has one, sums of 16-bit parts have four more. A float32 sum of `terms` products makes
    as many roundings of at most UNIT times a partial sum. Partial sums of random terms have at most
    the norm of the whole. An element may be off by ELEMENT times as much of itself and of the root
    mean square: more than six standard deviations of such errors.

    Args:
        result: a matrix or a vector.
        exact: in float64.
        terms: of all sums on the way to an element.
        dtype: that values are rounded to on the way.
        name: of the result.
    """
    check(result.shape == exact.shape, f"{name} is of shape {tuple(result.shape)}")
    allowed = torch.finfo(dtype).eps + UNIT * terms
    error = result.detach().double() - exact
    size = exact.abs() + exact.square().mean().sqrt()
    for part, found, limit in (
        ("a block", block_norms(error), allowed * block_norms(exact)),
        ("an element", error.abs(), ELEMENT * allowed * size),
    ):
        worst = (found / limit.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
        check(worst <= 1, f"{part} of {name} is {worst:.2f} times as far off as it may be")
