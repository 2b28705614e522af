"""Test regions and copies of operands in uncommon ways."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_ext
from autocast_cases import Seen

FP16 = torch.float16


def region() -> amp_ext.autocast:
    return amp_ext.autocast("cpu", dtype=FP16)


def state_of_autocast() -> tuple[Any, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
        torch.is_autocast_enabled(amp_ext._C.REGION_MARK),
    )


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("within", [False, True], ids=["outside", "in-a-region"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_enabled": 1},  # torch's own region stays on
        {"enabled": "yes", "dtype": torch.float32},  # torch has no such region, and sees no error
        {"dtype": "float16"},  # torch's own switches the region around it off
    ],
    ids=str,
)
def test_region_that_cannot_be_entered_changes_nothing(wrong: dict[str, Any], within: bool) -> None:
    """A region that fails to enter leaves the state of autocast unchanged."""

    def enter() -> None:
        with amp_ext.autocast("cpu", dtype=FP16, enabled=within):
            before = state_of_autocast()
            with pytest.raises(TypeError), amp_ext.autocast("cpu", **wrong):
                pytest.fail("entered")
            assert state_of_autocast() == before

    with ThreadPoolExecutor(1) as thread:  # the thread's end also ends leftover regions
        thread.submit(enter).result()


def test_checkpoint_within_a_checkpoint() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.full((2, 4), 300.0, requires_grad=True)

    def inner(h: Tensor) -> Tensor:
        return F.linear(h, weight)

    def outer(h: Tensor) -> Tensor:
        return checkpoint(inner, h * 1.0, use_reentrant=False)

    with region():
        result = checkpoint(outer, x, use_reentrant=False)
    result.backward(torch.full_like(result, 300.0))
    assert weight.grad.eq(180_000.0).all()


def test_disabled_region_of_another_device_type() -> None:
    square = torch.ones(2, 2)
    with region(), amp_ext.autocast("cuda", enabled=False), Seen() as seen:
        square @ square
    assert seen.gemms == 1


def test_negative_view_of_a_weight() -> None:
    weight = torch.randint(-3, 4, (4, 4, 2)).float().requires_grad_()
    view = torch.view_as_complex(weight).conj().imag
    assert view.is_neg()
    x = torch.eye(4)
    with region():
        result = x @ view
    assert result.equal(view.detach().half())
    result.float().sum().backward()
    assert weight.grad[..., 1].eq(-1).all()
    assert weight.grad[..., 0].eq(0).all()


class Elements(Seen):
    """Count the elements that conversions write."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_small_part_of_a_large_weight_is_cast_alone() -> None:
    table = torch.ones(1000, 4, requires_grad=True)
    with region(), Elements() as seen:
        F.linear(torch.ones(2, 4, dtype=FP16), table[:10])
    assert seen.count == 40


def test_expanded_operand_is_cast_before_it_is_expanded() -> None:
    a = torch.ones(1, 3, 8, 4, requires_grad=True)
    b = torch.ones(5, 1, 4, 2, requires_grad=True)
    with region(), Elements() as seen:
        result = a @ b
    assert seen.count == a.numel() + b.numel()
    result.sum(dtype=torch.float32).backward()
    assert a.grad.eq(10).all()
    assert b.grad.eq(24).all()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_freed_operand(dtype: torch.dtype, grad: bool) -> None:
    weight = torch.ones(3, 4, dtype=dtype, requires_grad=grad)
    weight.untyped_storage().resize_(0)
    for use in (F.linear, amp_ext.ops.linear):
        with region(), pytest.raises(RuntimeError, match=r"needs a storage of \d+ bytes"):
            use(torch.ones(2, 4), weight)


def test_parameter_made_in_inference_mode() -> None:
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.ones(3, 4))
    with torch.no_grad(), region():
        assert F.linear(torch.ones(2, 4), weight).eq(4).all()
