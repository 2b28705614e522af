"""What torch.utils.flop_counter counts for the products: 2 * m * n * k each, as for torch's own."""

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch

from amp_ext._library import _C  # noqa: F401  (registers the ops)
from amp_ext.ops._when_imported import when_imported

_Shape = Sequence[int]


def _product(a: _Shape, b: _Shape, *_: Any, trans_b: bool = False, **__: Any) -> int:
    columns = b[-2] if trans_b else b[-1]
    return 2 * prod(a[:-2] or b[:-2]) * prod(a[-2:]) * columns


def _accumulated_product(c: _Shape, a: _Shape, b: _Shape, **options: Any) -> int:
    return _product(a, b, **options)


def _mlp(
    x: _Shape, weight1: _Shape, bias1: _Shape | None, weight2: _Shape, *_: Any, **__: Any
) -> int:
    return 2 * prod(x[:-1]) * (prod(weight1) + prod(weight2))


def _gated_mlp(
    x: _Shape,
    gate_weight: _Shape,
    gate_bias: _Shape | None,
    up_weight: _Shape,
    up_bias: _Shape | None,
    down_weight: _Shape,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(x[:-1]) * (prod(gate_weight) + prod(up_weight) + prod(down_weight))


def _register(counter: ModuleType) -> None:
    """The formulas of all ops but linear, which reaches a counter as a gemm."""
    ops, register = torch.ops.amp_ext, counter.register_flop_formula
    register([ops.gemm, ops.gemm_with_aux, ops.gemm_times_derivative])(_product)
    register(ops.gemm_accumulate_)(_accumulated_product)
    register(ops.mlp)(_mlp)
    register(ops.gated_mlp)(_gated_mlp)


# Not imported for it: it imports Triton, which takes longer than importing all of this package.
when_imported("torch.utils.flop_counter", _register)
