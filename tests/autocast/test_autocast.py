"""Regions of amp_ext.autocast: the state and interface of torch.autocast, and routing."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import amp_ext
from autocast_cases import routed

x = torch.ones(2, 4)


def state() -> tuple[Any, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._is_any_autocast_enabled(),
    )


Region = Callable[..., Any]
REGIONS: dict[str, Callable[[Region], Any]] = {
    "default": lambda region: region("cpu"),
    "fp16": lambda region: region("cpu", torch.float16),
    "keywords": lambda region: region(device_type="cpu", dtype=torch.bfloat16, cache_enabled=False),
    "disabled": lambda region: region("cpu", enabled=False),
}
OURS, TORCHS = amp_ext.autocast, torch.autocast
FP16 = {"device_type": "cpu", "dtype": torch.float16}


@pytest.mark.parametrize("inner", REGIONS)
@pytest.mark.parametrize("outer", REGIONS)
@pytest.mark.parametrize(
    "kinds",
    [(OURS, OURS), (TORCHS, OURS), (OURS, TORCHS)],
    ids=["ours", "ours in torch's", "torch's in ours"],
)
def test_nesting(kinds: tuple[Region, Region], outer: str, inner: str) -> None:
    """Nested regions have the states of torch's, each time that the program enters them.

    Enabled regions of amp_ext route products, and so do regions of torch within them.
    """

    def seen(*regions: Any) -> list[Any]:
        found = [(state(), routed())]
        for _ in range(2):
            with regions[0]:
                found.append((state(), routed()))
                with regions[1]:
                    found.append((state(), routed()))
                found.append((state(), routed()))
            found.append((state(), routed()))
        return found

    names = outer, inner
    ours = seen(*(REGIONS[name](kind) for name, kind in zip(names, kinds, strict=True)))
    theirs = seen(*(REGIONS[name](TORCHS) for name in names))
    if kinds[1] is OURS:  # a region of torch does not reset the mark of ours
        assert [state for state, _ in ours] == [state for state, _ in theirs]
    is_ours = kinds[0] is OURS and outer != "disabled"
    within = inner != "disabled" and (kinds[1] is OURS or is_ours)
    assert [routes for _, routes in ours] == [False, *2 * [is_ours, within, is_ours, False]]


def test_has_torchs_interface() -> None:
    """amp_ext.autocast has the names and arguments of torch.autocast."""
    assert amp_ext.autocast.__name__ == "autocast"
    mine, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(cls).parameters.values()]
        for cls in (amp_ext.autocast, torch.autocast)
    )
    assert mine == torchs
    for function in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        assert getattr(amp_ext, function) is getattr(torch.amp, function)


def test_bad_device_type() -> None:
    """A bad device type raises torch's error."""
    with pytest.raises(RuntimeError) as expected:
        torch.autocast("nonsense")
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
        amp_ext.autocast("nonsense")


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
        with amp_ext.autocast(**FP16, enabled=within):
            before = state(), routed()
            with pytest.raises(TypeError), amp_ext.autocast("cpu", **wrong):
                pytest.fail("entered")
            assert (state(), routed()) == before

    with ThreadPoolExecutor(1) as thread:  # the thread's end also ends leftover regions
        thread.submit(enter).result()


def test_disabled_region_of_another_device_type() -> None:
    """A disabled region of another device type does not end the routing."""
    with amp_ext.autocast(**FP16), amp_ext.autocast("cuda", enabled=False):
        assert routed()


def test_each_call_of_a_decorated_function_has_a_region_of_its_own() -> None:
    """A decorated method may call itself and raise; a decorator enters a region of its class."""

    class Counted(amp_ext.autocast):
        entered: ClassVar[int] = 0

        def __enter__(self) -> amp_ext.autocast:
            Counted.entered += 1
            return super().__enter__()

    class Net(nn.Module):
        @Counted(**FP16)
        def forward(self, depth: int) -> list[bool]:
            """Documented."""
            if depth < 0:
                x @ x  # does not fit
            return [routed(), *(self(depth - 1) if depth else []), routed()]

    before = state()
    assert Net()(2) == 6 * [True]
    assert Counted.entered == 3
    assert Net.forward.__doc__ == "Documented."
    with pytest.raises(RuntimeError):
        Net()(-1)
    assert state() == before
    with torch.autocast(**FP16):
        assert not routed()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_entered_region_is_a_region_of_its_own(duplicate: Any) -> None:
    """A program may enter a copy of a region within the original."""
    region = amp_ext.autocast(**FP16)
    with region:
        with duplicate(region):
            assert routed()
        assert routed()
    assert not routed()
    assert not torch.is_autocast_enabled("cpu")
