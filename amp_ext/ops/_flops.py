"""What torch.utils.flop_counter counts for the products: 2 * m * n * k each, as for torch's own."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType
from typing import Any

import torch

from amp_ext._library import _C  # noqa: F401  (registers the ops)

_COUNTER = "torch.utils.flop_counter"
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


def _register(counter: ModuleType) -> None:
    """The formulas of all ops but linear, which reaches a counter as a gemm."""
    ops, register = torch.ops.amp_ext, counter.register_flop_formula
    register([ops.gemm, ops.gemm_with_aux, ops.gemm_times_derivative])(_product)
    register(ops.gemm_accumulate_)(_accumulated_product)
    register(ops.mlp)(_mlp)


class _Finder:
    """Registers the formulas when the counter is imported, and not before: the counter imports
    Triton, which takes longer than importing all of this package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                sys.meta_path.remove(_Finder)
                load(module)
                _register(module)

            spec.loader.exec_module = load_and_register
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _Finder)
