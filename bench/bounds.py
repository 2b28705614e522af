"""Exact results beside how far a 16-bit implementation may be from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from registry import check

UNIT = 2.0**-24  # half a unit in the last place of float32
SLOPE, CURVATURE = 1.13, 1.13  # of both gelus: largest |gelu'|, and a bound of |gelu''|
TANH_UNITS = 64  # of float32: what an implementation of erf, exp or tanh may be off
PARTS = 32
ROWS = 1024


@dataclass(frozen=True)
class Bounded:
    """A matrix in float64, and a bound of its error, element by element; 0.0 where it is exact.

    Sums of k products of 16-bit numbers, which are exact in float32, carry k - 1 roundings; where
    an operand is in error itself, its error is multiplied like a value.
    """

    value: Tensor
    error: Tensor | float = 0.0

    @classmethod
    def exact(cls, tensor: Tensor) -> Bounded:
        return cls(tensor.detach().double())

    @property
    def mT(self) -> Bounded:
        error = self.error if isinstance(self.error, float) else self.error.mT
        return Bounded(self.value.mT, error)

    @property
    def reach(self) -> Tensor:
        """The largest magnitude there may be."""
        return self.value.abs() + self.error

    def __matmul__(self, other: Bounded) -> Bounded:
        """A product summed in float32, in any order."""
        magnitude = self.value.abs() @ other.value.abs()
        error = self.value.shape[-1] * UNIT * magnitude
        if not isinstance(self.error, float) or not isinstance(other.error, float):
            error += self.reach @ other.reach - magnitude
        return Bounded(self.value @ other.value, error)

    def __add__(self, other: Bounded) -> Bounded:
        """A sum in float32, of which one term may come in up to PARTS parts."""
        rounding = PARTS * UNIT * (self.reach + other.reach)
        return Bounded(self.value + other.value, self.error + other.error + rounding)

    def column_sums(self) -> Bounded:
        """Of a matrix [m, n], in float32: [n]."""
        rounding = self.value.shape[0] * UNIT * self.reach.sum(0)
        error = (torch.zeros_like(self.value) + self.error).sum(0)
        return Bounded(self.value.sum(0), error + rounding)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """By half a unit in the last place of a dtype, or of its smallest subnormal number."""
        info = torch.finfo(dtype)
        half_unit = (info.eps / 2 * self.reach).clamp(min=info.tiny * info.eps / 2)
        return Bounded(self.value, self.error + half_unit)

    def gelu(self, approximate: str) -> Bounded:
        value = torch.nn.functional.gelu(self.value, approximate=approximate)
        return Bounded(value, SLOPE * self.error + TANH_UNITS * UNIT * self.reach)

    def times_gelu_derivative(self, at: Bounded, approximate: str) -> Bounded:
        """self * gelu'(at)."""
        inputs = at.value.clone().requires_grad_()
        with torch.enable_grad():
            total = torch.nn.functional.gelu(inputs, approximate=approximate).sum()
        derivative = torch.autograd.grad(total, inputs)[0]
        slack = CURVATURE * at.error + TANH_UNITS * UNIT
        return Bounded(
            self.value * derivative, SLOPE * self.error + self.reach * slack + UNIT * self.reach
        )

    def compare(self, result: Tensor, name: str) -> None:
        """Raise CheckError unless the result, of any floating-point dtype, is near enough."""
        check(result.shape == self.value.shape, f"{name} is of shape {tuple(result.shape)}")
        distance = (result.detach().double() - self.value).abs()
        worst = (distance / self.error.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
        check(worst <= 1, f"an element of {name} is {worst:.2f} times as far off as it may be")


def compare_products(
    a: Tensor,
    b: Tensor,
    results: dict[str, tuple[Tensor, Callable[[Bounded], Bounded]]],
    c: Tensor | None = None,
) -> None:
    """Compare several results of a @ b + c, some rows at a time to save memory.

    Args:
        a: [m, k].
        b: [k, n].
        results: [m, n] each, and what its implementation does to the sum in float32, to round it.
        c: [m, n] or None.
    """
    right = Bounded.exact(b)
    for start in range(0, a.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        total = Bounded.exact(a[rows]) @ right
        if c is not None:
            total = total + Bounded.exact(c[rows])
        for name, (result, ends) in results.items():
            ends(total).compare(result[rows], f"{name}'s result")
