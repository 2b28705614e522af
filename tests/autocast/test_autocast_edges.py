"""Test regions and copies of operands in uncommon ways."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

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


def test_disabled_region_of_another_device_type() -> None:
    """A disabled region of another device type does not end the routing."""
    square = torch.ones(2, 2)
    with region(), amp_ext.autocast("cuda", enabled=False), Seen() as seen:
        square @ square
    assert seen.gemms == 1


class Elements(Seen):
    """Count the elements that conversions write."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("product", "count"),
    [
        (lambda x, table: F.linear(x[0, 0], table[:10]), 8 + 40),
        (lambda x, table: x @ table[:20].view(5, 1, 4, 4), 24 + 80),
    ],
    ids=["a part", "expanded"],
)
def test_an_operand_is_cast_without_what_the_product_does_not_use(
    product: Any, count: int, grad: bool
) -> None:
    """A part of a large weight is cast alone, and an expanded operand before it is expanded."""
    x, table = (torch.ones(s, requires_grad=grad) for s in ((1, 3, 2, 4), (1000, 4)))
    with region(), Elements() as seen:
        product(x, table)
    assert seen.count == count


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_freed_operand(dtype: torch.dtype, grad: bool) -> None:
    """An operand whose storage has been freed is an error."""
    weight = torch.ones(3, 4, dtype=dtype, requires_grad=grad)
    weight.untyped_storage().resize_(0)
    for use in (F.linear, amp_ext.ops.linear):
        with region(), pytest.raises(RuntimeError, match=r"needs a storage of \d+ bytes"):
            use(torch.ones(2, 4), weight)


def test_parameter_made_in_inference_mode() -> None:
    """A parameter without a version is cast."""
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.ones(3, 4))
    with torch.no_grad(), region():
        assert F.linear(torch.ones(2, 4), weight).eq(4).all()
