"""Calls of amp_ext::gemm: running and comparing them, and forms that differ in their gradients."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import reference
from cases import KINDS, TRANSPOSES, assert_sum_near, integers, stored, unwritten
from executors import Executor

Leaves = dict[str, Tensor]

SIZES = {"small": (17, 33, 40), "large": (65, 50, 45)}
"""m, n and k on either side of 2**17 multiplications, below which a CPU calls no library."""

every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
every_kind = pytest.mark.parametrize("dtypes", KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
every_transpose = pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])


def product(
    executor: Executor,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    trans: tuple[bool, bool] = (False, False),
    layouts: Sequence[str] = ("contiguous", "contiguous"),
    batches: Sequence[tuple[int, ...]] = ((), ()),
) -> tuple[Tensor, Tensor, dict[str, bool], Tensor]:
    """Return operands of integers, the options that transpose them, and their exact product."""
    m, n, k = sizes
    a = stored(integers((*batches[0], m, k), dtypes[0], executor.device), trans[0], layouts[0])
    b = stored(integers((*batches[1], k, n), dtypes[1], executor.device), trans[1], layouts[1])
    left = a.double().mT if trans[0] else a.double()
    right = b.double().mT if trans[1] else b.double()
    return a, b, {"trans_a": trans[0], "trans_b": trans[1]}, left @ right


def gemm(executor: Executor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Run the op; assert that it has written to no argument, and the result's dtype and device."""
    arguments = [a, b, *(value for value in options.values() if isinstance(value, Tensor))]
    with unwritten(arguments):
        result = executor.ops.gemm(a, b, **options)
    promoted = torch.promote_types(a.dtype, b.dtype)
    assert result.dtype == (options.get("out_dtype") or promoted)
    assert result.device.type == executor.device.type
    return result


def assert_near_oracle(executor: Executor, a: Tensor, b: Tensor, **options: Any) -> None:
    """Compare with the oracle, within the bound of `assert_sum_near`."""
    actual = gemm(executor, a, b, **options)
    options["out_dtype"] = torch.float64
    exact = reference.gemm(a, b, **options)
    for name, value in options.items():
        if name in ("c", "bias", "alpha", "beta") and value is not None:
            options[name] = abs(value)
    magnitude = reference.gemm(a.abs(), b.abs(), **options)
    terms = a.shape[-2 if options.get("trans_a") else -1]
    terms *= a.shape[:-2].numel() if options.get("sum_batch") else 1
    # torch rounds FP64 to 16 bits by way of FP32.
    in_fp64 = torch.float64 in (a.dtype, b.dtype) and actual.element_size() > 2
    unit = 2.0**-52 if in_fp64 else 2.0**-24
    assert_sum_near(actual, exact, magnitude, terms, unit)


class Form(NamedTuple):
    """Shapes of the tensors, with letters for sizes, and the other arguments."""

    shapes: dict[str, str]
    options: dict[str, Any]

    def leaves(self, sizes: dict[str, int], make: Callable[[tuple[int, ...]], Tensor]) -> Leaves:
        shapes = {name: tuple(sizes[c] for c in shape) for name, shape in self.shapes.items()}
        return {name: make(shape).requires_grad_() for name, shape in shapes.items()}


FORMS = {
    "plain": Form({"a": "mk", "b": "kn"}, {}),
    "nt": Form({"a": "mk", "b": "nk"}, {"trans_b": True, "alpha": 2.0}),
    "tn": Form({"a": "km", "b": "kn"}, {"trans_a": True, "alpha": -1.0}),
    "tt": Form({"a": "km", "b": "nk"}, {"trans_a": True, "trans_b": True}),
    "c": Form({"a": "mk", "b": "kn", "c": "mn"}, {"alpha": 0.5, "beta": -2.0}),
    "c-row": Form({"a": "mk", "b": "kn", "c": "n"}, {}),
    "c-column": Form({"a": "mk", "b": "kn", "c": "m1"}, {"beta": 2.0}),
    "c-scalar": Form({"a": "mk", "b": "kn", "c": ""}, {}),
    "c-one": Form({"a": "mk", "b": "kn", "c": "11"}, {}),
    "beta-0": Form({"a": "mk", "b": "kn", "c": "mn"}, {"beta": 0.0}),
    "alpha-0": Form({"a": "mk", "b": "kn", "c": "mn", "bias": "n"}, {"alpha": 0.0}),
    "bias": Form({"a": "mk", "b": "kn", "bias": "n"}, {}),
    "all": Form(
        {"a": "km", "b": "nk", "c": "mn", "bias": "n"},
        {"trans_a": True, "trans_b": True, "alpha": -1.0, "beta": 2.0},
    ),
    "batch": Form({"a": "xmk", "b": "xkn", "c": "1mn", "bias": "n"}, {}),
    "batches": Form({"a": "xymk", "b": "xynk", "c": "ymn"}, {"trans_b": True}),
    "shared-a": Form({"a": "mk", "b": "xkn", "c": "x1n", "bias": "n"}, {"alpha": 2.0}),
    "shared-a-tt": Form({"a": "km", "b": "xynk"}, {"trans_a": True, "trans_b": True}),
    "shared-b": Form({"a": "xmk", "b": "kn", "c": "m1", "bias": "n"}, {}),
    "shared-b-tt": Form({"a": "xykm", "b": "nk"}, {"trans_a": True, "trans_b": True}),
    "sum": Form(
        {"a": "xmk", "b": "xkn", "c": "mn", "bias": "n"},
        {"sum_batch": True, "alpha": -1.0},
    ),
    "sum-tt": Form(
        {"a": "xykm", "b": "xynk", "c": "n"},
        {"trans_a": True, "trans_b": True, "sum_batch": True},
    ),
}
SMALL = {"m": 3, "k": 4, "n": 2, "x": 2, "y": 3, "1": 1}
LARGE = {"m": 65, "k": 70, "n": 33, "x": 5, "y": 3, "1": 1}


def cast(leaves: Leaves, dtypes: Iterable[torch.dtype]) -> Leaves:
    """Return leaves with the same values in dtypes that represent them."""
    return {
        name: t.detach().to(dtype).requires_grad_()
        for (name, t), dtype in zip(leaves.items(), dtypes, strict=False)
    }


def gradients(run: Callable[..., Tensor], leaves: Leaves, grad: Tensor, **options: Any) -> Leaves:
    """Return the leaves' gradients; leaves outside the graph have 0."""
    out, tensors = run(**leaves, **options), list(leaves.values())
    found = torch.autograd.grad(out, tensors, grad, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def doubles(leaves: Leaves) -> Leaves:
    return cast(leaves, itertools.repeat(torch.float64))
