"""Count the operations of products for torch.utils.flop_counter: 2 * m * n * k each."""

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch

from amp_ext.ops._when_imported import when_imported

_Shape = Sequence[int]


def _product(a: _Shape, b: _Shape, *_: Any, trans_b: bool = False, **__: Any) -> int:
    columns = b[-2] if trans_b else b[-1]
    return 2 * prod(a[:-2] or b[:-2]) * prod(a[-2:]) * columns


def _register(counter: ModuleType) -> None:
    ops, register = torch.ops.amp_ext, counter.register_flop_formula
    register(ops.gemm)(_product)
    register(ops.gemm_accumulate_)(lambda c, *product, **options: _product(*product, **options))


# An import of the counter would import Triton, and take longer than this whole package.
when_imported("torch.utils.flop_counter", _register)
