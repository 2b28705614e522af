"""Test the routing of ops to amp_ext's GEMM and to torch, and the values of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from autocast_cases import FORMS, LOW, Form, Seen, assert_within
from cases import assert_same

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_dtype = pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# The dtypes of the operands in turn, and of the addends, under autocast's dtype `low`.
OPERANDS: dict[str, Callable[[torch.dtype], tuple[list[torch.dtype], torch.dtype]]] = {
    "fp32": lambda low: ([FP32], FP32),
    "low": lambda low: ([low], low),
    "low and fp32": lambda low: ([low, FP32], FP32),
    "fp32 and low": lambda low: ([FP32, low], low),
    "both low": lambda low: ([FP16, BF16], FP16),
}


@every_dtype
@every_form
def test_routed(form: Form, dtype: torch.dtype) -> None:
    """A form is one product of gemm, with torch's dtype, shape and strides, and is rounded once."""
    for i, operands in enumerate((*OPERANDS, "fp32")):
        tensors = form.tensors(*OPERANDS[operands](dtype))
        expected = form.bounds(lambda x, scalars: form.run(*x, **scalars), tensors, dtype)
        for tensor in tensors:
            tensor.requires_grad_(i % 2 == 1)
        with amp_ext.autocast("cpu", dtype=dtype), Seen() as seen:
            result = form.run(*tensors, **form.scalars)
        with torch.autocast("cpu", dtype=dtype):
            torchs = form.run(*tensors, **form.scalars)

        assert (seen.gemms, seen.torchs) == (1, 0), (operands, seen.ops)
        assert result.requires_grad == (i % 2 == 1)
        assert (result.dtype, result.shape) == (dtype, torchs.shape)
        assert used_strides(result) == used_strides(torchs)
        assert torchs._is_view() or not result._is_view()
        assert_within(result.detach(), *expected)


def used_strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions of more than one element."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


Call = Callable[[Callable[..., Tensor]], Tensor]

# `t(*shape)` makes a tensor of the dtype under test.
NOT_ROUTED: dict[str, Call] = {
    "addbmm": lambda t: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "1-D @ 1-D": lambda t: t(4) @ t(4),
    "out=": lambda t: torch.mm(t(3, 4), t(4, 5), out=t(3, 5)),
    "addmm_": lambda t: t(3, 5).addmm_(t(3, 4), t(4, 5)),
    "conv2d 1x3": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 3)),
    "conv2d 3x1": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 3, 1)),
    "conv2d, stride 1 and 2": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 1), stride=(1, 2)),
    "conv2d, stride 2, valid": lambda t: F.conv2d(
        t(2, 4, 6, 6), t(5, 4, 1, 1), stride=2, padding="valid"
    ),
    "conv2d, padding 0 and 1": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 1), padding=(0, 1)),
    "conv2d, 2 groups": lambda t: F.conv2d(t(2, 4, 6, 6), t(6, 2, 1, 1), groups=2),
    # Shapes that do not fit raise torch's error.
    "misfit, linear": lambda t: F.linear(t(3, 4), t(5, 3)),
    "misfit, linear, bias": lambda t: F.linear(t(3, 4), t(5, 4), t(4)),
    "misfit, linear, 3-D weight": lambda t: F.linear(t(3, 4), t(2, 4, 4)),
    "misfit, mm": lambda t: t(3, 4).mm(t(3, 5)),
    "misfit, mm, 3-D": lambda t: t(2, 3, 4).mm(t(4, 5)),
    "misfit, addmm": lambda t: torch.addmm(t(4), t(3, 4), t(4, 5)),
    "misfit, matmul": lambda t: t(2, 3, 4) @ t(3, 5),
    "misfit, matmul, batches": lambda t: t(2, 3, 4) @ t(3, 4, 5),
    "misfit, matmul, 0-dim": lambda t: t(2, 3, 4) @ t(),
    "misfit, bmm": lambda t: t(2, 3, 4).bmm(t(3, 4, 5)),
    "misfit, baddbmm": lambda t: torch.baddbmm(t(4), t(2, 3, 4), t(2, 4, 5)),
    "misfit, conv2d": lambda t: F.conv2d(t(2, 3, 4, 4), t(5, 4, 1, 1)),
    "misfit, conv2d, bias": lambda t: F.conv2d(t(2, 4, 3, 3), t(5, 4, 1, 1), t(4)),
    "misfit, conv2d, 2-D image": lambda t: F.conv2d(t(4, 4), t(5, 4, 1, 1)),
    "misfit, conv2d, padding": lambda t: F.conv2d(t(2, 4, 3, 3), t(5, 4, 1, 1), padding="some"),
    **{
        f"misfit, conv2d, {name} of 3": lambda t, name=name: torch.ops.aten.conv2d(
            t(1, 2, 3, 3), t(4, 2, 1, 1), **{name: 3 * [name != "padding"]}
        )
        for name in ("stride", "padding", "dilation")
    },
}


def outcomes(call: Call, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[list[Any], Seen]:
    """Return the results of amp_ext and torch in a region of dtypes[0] for tensors of dtypes[1]."""
    results: list[Any] = []
    state = torch.get_rng_state()
    for region, mode in ((torch.autocast, Seen()), (amp_ext.autocast, Seen())):
        torch.set_rng_state(state)
        try:
            with region("cpu", dtype=dtypes[0]), mode:
                results.append(call(lambda *shape: (4 * torch.randn(shape)).to(dtypes[1])))
        except Exception as error:  # torch defines the expected error
            results.append((type(error), str(error)))
    return results, mode


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """The same tensor, bit for bit, or the same error."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        assert ours.stride() == theirs.stride()
        assert_same(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_not_routed(name: str) -> None:
    """Other ops have torch's results, bit for bit, and torch's errors."""
    for dtypes in ((FP16, FP32), (FP16, FP16), (BF16, BF16)):
        (theirs, ours), seen = outcomes(NOT_ROUTED[name], dtypes)
        assert seen.gemms == 0
        assert isinstance(theirs, tuple) or not name.startswith("misfit")
        assert_same_outcome(ours, theirs)


PRODUCTS: dict[str, Call] = {
    "linear": lambda t: F.linear(t(3, 4), t(5, 4), t(5)),
    "mm": lambda t: t(3, 4).mm(t(4, 5)),
    "addmm": lambda t: torch.addmm(t(5), t(3, 4), t(4, 5)),
    "matmul": lambda t: t(2, 3, 4) @ t(4, 5),
    "bmm": lambda t: t(2, 3, 4).bmm(t(2, 4, 5)),
    "baddbmm": lambda t: torch.baddbmm(t(5), t(2, 3, 4), t(2, 4, 5)),
    "conv2d": lambda t: F.conv2d(t(2, 4, 3, 3), t(5, 4, 1, 1), t(5)),
}
every_product = pytest.mark.parametrize("call", PRODUCTS.values(), ids=PRODUCTS)
OTHER_DTYPES = (torch.float64, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("odd", range(3))
@every_product
def test_one_tensor_of_another_dtype_is_torchs(call: Call, odd: int) -> None:
    """A product with one tensor that gemm does not take is torch's, or torch's error."""
    for other in OTHER_DTYPES:
        made: list[Tensor] = []

        def mixed(t: Callable[..., Tensor], other: Any = other, made: Any = made) -> Tensor:
            made.clear()
            return call(
                lambda *shape: (
                    made.append(t(*shape).to(other if len(made) == odd else FP32)) or made[-1]
                )
            )

        (theirs, ours), seen = outcomes(mixed, (FP16, FP32))
        assert seen.gemms == (len(made) <= odd)
        if len(made) > odd:
            assert_same_outcome(ours, theirs)
