"""Exact results beside how far a 16-bit implementation may be from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.registry import check, faults

UNIT = 2.0**-24  # half a unit in the last place of float32
DEVIATIONS = 4  # as many standard deviations no sum of terms of random signs is expected to reach
PARTS_OF_16_BITS = 4
PARTS = 32  # in which a term of a sum in float32 may come
ROWS = 1024
TANH_UNITS = 64  # of float32: what an implementation of erf, exp or tanh may be off
BLOCK = 128
ELEMENT = 8  # times the relative error that a block may have


@dataclass(frozen=True)
class Bounded:
    """A matrix in float64, and a bound of its error, element by element."""

    value: Tensor
    error: Tensor

    @classmethod
    def product(cls, a: Tensor, b: Tensor, c: Tensor | None = None) -> Bounded:
        """a @ b + c, summed in float32 in any order.

        Products of 16-bit numbers are exact in float32. Each of the k - 1 additions is off by at
        most UNIT times the partial sum that it makes, and no partial sum is larger than |a| @ |b|.
        That bound grows with k, while sums of terms of random signs grow with its square root. A
        partial sum is therefore taken to be at most DEVIATIONS times its standard deviation
        sqrt(a^2 @ b^2). This holds for random operands only, and by probability: a sum passes it
        with 2 exp(-DEVIATIONS^2 / 2) = 7e-4 at most (Hoeffding's inequality), and an error passes
        the bound only where such sums come with roundings that all go one way.
        """
        a, b = a.double(), b.double()
        value, magnitude = a @ b, a.abs() @ b.abs()
        deviation = (a.square() @ b.square()).sqrt_()
        error = a.shape[-1] * UNIT * torch.minimum(magnitude, DEVIATIONS * deviation)
        if c is not None:
            error += PARTS * UNIT * (value.abs() + error + c.abs())
            value += c
        return cls(value, error)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """By half a unit in the last place of a dtype, or of its smallest subnormal number."""
        info = torch.finfo(dtype)
        reach = self.value.abs() + self.error
        half_unit = (info.eps / 2 * reach).clamp(min=info.tiny * info.eps / 2)
        return Bounded(self.value, self.error + half_unit)

    def in_parts(self, terms: int, dtype: torch.dtype) -> Bounded:
        """This sum of so many terms, had it been added up from parts rounded to a 16-bit dtype.

        The error in float32 over terms * UNIT is what a partial sum may reach; each part is off by
        half a unit of that, and so is each sum of parts.
        """
        units = PARTS_OF_16_BITS * torch.finfo(dtype).eps / (terms * UNIT)
        return Bounded(self.value, self.error * (1 + units))

    def compare(self, result: Tensor, name: str) -> None:
        """Raise CheckError unless the result, of any floating-point dtype, is near enough."""
        check(result.shape == self.value.shape, f"{name} is of shape {tuple(result.shape)}")
        distance = (result.detach().double() - self.value).abs()
        worst = (distance / self.error.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
        check(worst <= 1, f"an element of {name} is {worst:.2f} times as far off as it may be")


def compare_products(
    a: Tensor,
    b: Tensor,
    results: Mapping[str, tuple[Tensor, Callable[[Bounded], Bounded]]],
    c: Tensor | None = None,
) -> dict[str, str]:
    """What is wrong with several results of a @ b + c, by name.

    The exact product is computed once for all of them, some rows at a time to save memory.

    Args:
        a: [m, k].
        b: [k, n].
        results: [m, n] each, and what its implementation does to the sum in float32, to round it.
        c: [m, n] or None.
    """
    size = a.shape[0], b.shape[1]

    def check_shape(name: str) -> None:
        shape = results[name][0].shape
        check(shape == size, f"{name}'s result is of shape {tuple(shape)}")

    def compare_rows(name: str, rows: slice, total: Bounded) -> None:
        result, ends = results[name]
        ends(total).compare(result[rows], f"{name}'s result")

    wrong = faults({name: partial(check_shape, name) for name in results})
    for start in range(0, a.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        total = Bounded.product(a[rows], b, None if c is None else c[rows])
        left = [name for name in results if name not in wrong]
        wrong |= faults({name: partial(compare_rows, name, rows, total) for name in left})
    return wrong


def block_norms(matrix: Tensor) -> Tensor:
    """The norms, in float64, of blocks of about BLOCK rows and columns; a vector is one row."""
    sums = torch.atleast_2d(matrix).double().square()
    for dim in (0, 1):
        parts = sums.tensor_split(max(1, sums.shape[dim] // BLOCK), dim)
        sums = torch.cat([part.sum(dim, keepdim=True) for part in parts], dim)
    return sums.sqrt_()


def compare_blocks(result: Tensor, exact: Tensor, terms: int, name: str) -> None:
    """Raise CheckError where a block of the result is further from the exact one, in norm, than
    roundings of its dtype explain: by more than eps of the exact block's norm.

    Rounding errors are at most eps / 2 of the values. Spread evenly, as those of random numbers
    are, they come to eps / sqrt(12) of the norm, products with random matrices pass them on in
    proportion, and those of several roundings add up in quadrature: of twelve to eps. Layers have
    six in a row at most; sums of 16-bit parts may add to them. Sums in float32 of `terms` products
    add UNIT * sqrt(terms) likewise, and an activation TANH_UNITS.

    A single element may be off by ELEMENT times as much, of itself and of the result's root mean
    square: more than six standard deviations of such errors.

    Args:
        result: a matrix or a vector, of any floating-point dtype.
        exact: in float64.
        terms: of all sums on the way to an element.
        name: of the result, for the error.
    """
    check(result.shape == exact.shape, f"{name} is of shape {tuple(result.shape)}")
    result = result.detach()
    allowed = torch.finfo(result.dtype).eps + UNIT * (TANH_UNITS + math.sqrt(terms))
    error = result.double() - exact
    size = exact.abs() + exact.square().mean().sqrt()
    for what, found, limit in (
        ("a block", block_norms(error), allowed * block_norms(exact)),
        ("an element", error.abs(), ELEMENT * allowed * size),
    ):
        worst = (found / limit.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
        check(worst <= 1, f"{what} of {name} is {worst:.2f} times as far off as it may be")
