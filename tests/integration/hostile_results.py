"""Compare an op's writes with the oracle's: bit for bit, products within their bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import reference
from amp_ext.ops import LIST_OPS
from cases import ACTIVATIONS, CURVED, assert_same, assert_sum_near, spacing

Values = dict[str, Any]
UNIT = 2.0**-24  # half a unit in the last place of float32
SLOPE, TANH_UNITS = 1.13, 64  # of curved activations: the steepest slope, and errors in UNITs
BEYOND = 1e37  # sums of such terms may overflow float32 on the way to a result that does not


class Sum(NamedTuple):
    """Hold exact float64 values, the error bound of sums in the op's type, and the magnitude of
    their finite terms.
    """

    value: Tensor
    error: Tensor
    terms: Tensor

    def activated(self, activation: str, dtype: torch.dtype) -> Sum:
        if activation == "none":
            return self
        if activation == "relu":
            return self._replace(value=self.value.relu())
        value = ACTIVATIONS[activation](self.value)
        reach = self.value.abs() + self.error
        error = SLOPE * self.error + TANH_UNITS * UNIT * reach
        if dtype == torch.bfloat16:  # torch's library rounds to it first
            error = error + SLOPE * spacing(reach, dtype) / 2
        infinite = self.value.isinf()  # where torch's own is NaN, or the limit
        terms = torch.where(infinite, torch.inf, self.terms)
        return Sum(torch.where(infinite, 0.0, value), error, terms)

    def assert_near(self, actual: Tensor) -> None:
        """Assert that `actual` is this, rounded once; skip terms too large for a bound."""
        actual = actual.detach()
        assert actual.shape == self.value.shape, f"{actual.shape}, expected {self.value.shape}"
        known = (self.terms < BEYOND) & (self.error.isfinite() | ~self.value.isfinite())
        error = torch.where(self.error.isfinite(), self.error, 0.0) + 2.0**-140
        # A unit of 1/4 and four roundings without terms allow an error of the magnitude.
        assert_sum_near(actual[known], self.value[known], error[known], 0, 0.25)


def unit_of(*operands: Tensor) -> float:
    return 2.0**-52 if any(t.dtype == torch.float64 for t in operands) else UNIT


def product(values: Values, **other: Any) -> Sum:
    """Return the product before gemm's activation."""
    known = ("a", "b", "trans_a", "trans_b", "sum_batch", "c", "alpha", "beta", "bias")
    options = {n: values[n] for n in known if n in values} | other
    options["out_dtype"] = torch.float64
    value = reference.gemm(**options)
    for name in ("a", "b", "c", "bias", "alpha", "beta"):
        if options.get(name) is not None:
            options[name] = abs(options[name])
    magnitude = reference.gemm(**options)
    for name in ("a", "b", "c", "bias"):
        if options.get(name) is not None:
            options[name] = options[name].double().nan_to_num(0, 0, 0)
    finite = reference.gemm(**options)
    a = values["a"]
    terms = a.shape[-2 if values.get("trans_a") else -1]
    terms *= a.shape[:-2].numel() if values.get("sum_batch") else 1
    return Sum(value, (terms + 4) * unit_of(a, values["b"]) * magnitude, finite)


def result_dtype(values: Values) -> torch.dtype:
    return values.get("out_dtype") or torch.promote_types(values["a"].dtype, values["b"].dtype)


def assert_dtype(actual: Tensor, expected: torch.dtype) -> None:
    assert actual.dtype == expected, f"{actual.dtype}, expected {expected}"


def compare_gemm(copies: Values, values: Values, result: Tensor) -> None:
    dtype = result_dtype(copies)
    assert_dtype(result, dtype)
    product(copies).activated(copies.get("activation", "none"), dtype).assert_near(result)


def compare_gemm_with_aux(copies: Values, values: Values, result: Any) -> None:
    compare_gemm(copies, values, result[0])
    product(copies).assert_near(result[1])


def compare_gemm_times_derivative(copies: Values, values: Values, result: Any) -> None:
    exact, _ = reference.gemm_times_derivative(**copies | {"out_dtype": torch.float64})
    x = product(copies)
    error = x.error
    if copies.get("activation") == "relu":  # aux is rounded to float32
        tiny = (copies["aux"] > 0) & (copies["aux"].double() < 2.0**-149)
        x = x._replace(terms=torch.where(tiny, torch.inf, x.terms))
        error = torch.where(copies["aux"] <= 0, 0.0, error)
    if copies.get("activation") in CURVED:
        error = SLOPE * error + TANH_UNITS * UNIT * (x.value.abs() + error)
    assert_dtype(result[0], result_dtype(copies))
    Sum(exact, error, x.terms).assert_near(result[0])
    exact, error, terms = (t.flatten(0, -2) for t in (exact, error, x.terms))
    rounding = (len(exact) + 4) * unit_of(copies["a"], copies["b"]) * exact.abs().sum(0)
    Sum(exact.sum(0), error.sum(0) + rounding, terms.sum(0)).assert_near(result[1])


def compare_gemm_accumulate_(copies: Values, values: Values, result: None) -> set[str]:
    c = values["c"].detach()
    x, before = product(copies, c=None), copies["c"].double()
    terms = x.terms + before.abs().nan_to_num(0, 0, 0)
    Sum(before + x.value, x.error + 4 * UNIT * before.abs(), terms).assert_near(c)
    return {"c"}


def compare_linear(copies: Values, values: Values, result: Tensor) -> None:
    x = copies["x"]
    operands = {"a": x.view(1, -1) if x.dim() == 1 else x, "b": copies["weight"], "trans_b": True}
    rows = result.view(1, -1) if x.dim() == 1 else result
    compare_gemm(copies | operands, values, rows)


def compare_mlp(copies: Values, values: Values, result: Tensor) -> None:
    """Compare nothing: its products are those of linear."""


compare_gated_mlp = compare_mlp


def resolved(value: Any) -> Any:
    """Return tensors without a negation: torch's copy_ to another dtype may lose it."""
    if isinstance(value, list):
        return [resolved(item) for item in value]
    return value.resolve_neg() if isinstance(value, Tensor) else value


def compare_list_op(op: str, copies: Values, values: Values, result: Any) -> set[str]:
    if copies.get("max_scale") is not None:  # torch's clamp takes no more
        copies["max_scale"] = min(copies["max_scale"], torch.finfo(torch.float32).max)
    expected = getattr(reference, op)(**copies)
    if op == "grad_norm":
        pairs = [(result, expected)]
        if copies.get("norms") is not None:
            pairs.append((values["norms"].detach(), copies["norms"]))
        for actual, exact in pairs:  # the sums of squares are rounded in float64
            torch.testing.assert_close(
                actual, exact, rtol=2.0**-22, atol=1e-44, equal_nan=True, check_stride=False
            )
    for name, value in copies.items():
        tensors = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, tensor in tensors:
            if isinstance(tensor, Tensor) and name != "norms":
                actual = values[name] if index is None else values[name][index]
                assert_same(actual.detach().resolve_neg(), tensor)
    return {*copies, *(f"{name}[{i}]" for name in copies for i in range(_length(copies[name])))}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def compare_results(op: str, copies: Values, values: Values, result: Any) -> set[str]:
    """Let the oracle do the same with `copies` and compare.

    Returns the names of written arguments that are right without being equal bit by bit.
    """
    plain = {name: resolved(value) for name, value in copies.items()}
    if op in LIST_OPS:
        compared = compare_list_op(op, plain, values, result)
        for name, value in copies.items():
            for view, tensor in zip(value, plain[name], strict=True) if _length(value) else ():
                if view.is_neg():
                    view.copy_(tensor)
        return compared
    return globals()[f"compare_{op}"](plain, values, result) or set()
