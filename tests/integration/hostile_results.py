"""Compare an op's writes with the oracle's: bit for bit, except for curved activations.

Operands of products are small integers, infinities and NaN: their sums are exact in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import reference
from amp_ext.ops import LIST_OPS
from cases import CURVED, assert_same

Values = dict[str, Any]


def assert_close(actual: Tensor, exact: Tensor, is_curved: bool = False, atol: Any = 0) -> None:
    """Assert that `actual` is `exact`, rounded once.

    A factor of 1e-39 is subnormal in float32. A curved activation of numbers below 1000 is off by
    64 * 2**-24 of them at most. torch's library rounds to 16 bits before the activation too.
    """
    actual, expected = actual.detach(), exact.to(actual.dtype)
    eps = torch.finfo(actual.dtype).eps
    rtol = 4 * eps if is_curved else 2.0**-48 if actual.dtype == torch.float64 else 0.0
    atol = atol + (2.0**-8 if is_curved else 1e-40)
    is_near = (actual.double() - exact).abs() <= atol + rtol * exact.abs()
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert actual.shape == exact.shape and bool((is_near | is_same).all()), (actual, expected)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def is_whole(x: Any) -> bool:
    """Return whether a tensor has small integers; one that shares memory may have other numbers."""
    finite = x[x.isfinite()] if isinstance(x, Tensor) else torch.zeros(1)
    return bool(((finite == finite.round()) & (finite.abs() <= 8)).all())


def compare_product(op: str, copies: Values, result: Any) -> None:
    """Compare the results of an op that writes no argument."""
    wide: Values = {"out_dtype": torch.float64}
    if op == "linear":
        wide = {name: x.double() for name, x in copies.items() if isinstance(x, Tensor)}
    exact = as_tuple(getattr(reference, op)(**copies | wide))
    linear = as_tuple(getattr(reference, op)(**copies | wide | {"activation": "none"}))[0]
    operands = ("x", "weight") if op == "linear" else ("a", "b")
    promoted = torch.promote_types(*(copies[name].dtype for name in operands))
    y, *others = as_tuple(result)
    assert y.dtype == (copies.get("out_dtype") or promoted), y.dtype
    is_curved = copies.get("activation") in CURVED
    # At infinities, torch's own activations are NaN, or the limit.
    known = linear.isfinite() & exact[0].isfinite() if is_curved else torch.ones_like(linear) > 0
    assert_close(y[known], exact[0][known], is_curved)
    if op == "gemm_with_aux":
        assert_close(others[0], exact[1])
    elif others:
        rows, of_rows = exact[0].flatten(0, -2), known.flatten(0, -2).all(0)
        slack = len(rows) * 2.0**-8 + 4 * torch.finfo(y.dtype).eps * rows.abs().sum(0)
        slack = slack[of_rows] if is_curved else 0
        assert_close(others[0][of_rows], exact[1][of_rows], is_curved, slack)


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
    if op in ("mlp", "gated_mlp"):  # their products are those of linear
        return set()
    if not all(map(is_whole, plain.values())):
        return {"c"}
    if op == "gemm_accumulate_":
        reference.gemm_accumulate_(**plain)
        assert_close(values["c"], plain["c"].double())
        return {"c"}
    compare_product(op, plain, result)
    return set()
