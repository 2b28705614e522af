"""Regions of amp_ext.autocast: the state and interface of torch.autocast, and routing.

Importing amp_ext changes nothing in torch.
"""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from autocast_cases import Seen

x = torch.ones(2, 4)
square = torch.ones(4, 4)


def state() -> tuple[Any, ...]:
    return (
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


def routed() -> bool:
    """Whether a product is, here and now."""
    with Seen() as seen:
        x @ square
    return seen.gemms == 1


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


def test_decorates_functions_and_methods() -> None:
    """A decorated method runs in a region."""

    class Net(nn.Module):
        @amp_ext.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, value: Tensor) -> Tensor:
            """Documented."""
            return value @ square

    assert Net()(x).dtype == torch.bfloat16
    assert Net.forward.__doc__ == "Documented."
    assert not torch.is_autocast_enabled("cpu")


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


@pytest.mark.parametrize("device_type", ["nonsense", 3, None], ids=repr)
def test_bad_device_type(device_type: Any) -> None:
    """A bad device type raises torch's error."""
    errors = []
    for region in (torch.autocast, amp_ext.autocast):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            region(device_type)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_custom_functions_are_routed_forward_and_backward() -> None:
    """A custom backward pass that runs after the region enters one by custom_bwd."""

    class Product(torch.autograd.Function):
        @staticmethod
        @amp_ext.custom_fwd(device_type="cpu")
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value @ square

        @staticmethod
        @amp_ext.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad @ square

    counts = []
    for region in (amp_ext.autocast, torch.autocast):
        with region(**FP16), Seen() as seen:
            result = Product.apply(x.clone().requires_grad_())
        with Seen() as seen_backward:
            result.sum().backward()
        counts.append((seen.gemms, seen_backward.gemms))
    assert counts == [(1, 1), (0, 0)]


def test_nothing_is_routed_after_an_exception() -> None:
    """An exception leaves the region."""

    @amp_ext.autocast(**FP16)
    def fails() -> None:
        assert routed()
        x @ x  # does not fit

    before = state()
    with pytest.raises(RuntimeError):
        fails()
    assert state() == before
    assert not routed()
    with torch.autocast(**FP16):
        assert not routed()


def test_a_decorator_enters_a_region_of_its_class() -> None:
    """A decorator of a subclass enters a region of the subclass."""

    class Counted(amp_ext.autocast):
        entered: ClassVar[int] = 0

        def __enter__(self) -> amp_ext.autocast:
            Counted.entered += 1
            return super().__enter__()

    decorated = Counted(**FP16)(routed)
    assert decorated() and decorated()
    assert Counted.entered == 2


def test_a_decorated_function_may_call_itself() -> None:
    """Each call of a decorated function has a region of its own."""

    @amp_ext.autocast(**FP16)
    def calls(depth: int) -> list[bool]:
        return [routed(), *(calls(depth - 1) if depth else []), routed()]

    assert calls(2) == 6 * [True]
    assert not routed() and not torch.is_autocast_enabled("cpu")


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


IMPORT_CHANGES_NOTHING = """
import warnings
import torch

def names():
    spaces = (torch, torch.amp, torch.amp.grad_scaler, torch.amp.autocast_mode, torch.optim)
    return [dict(vars(space)) for space in spaces]

ops = torch._C._dispatch_get_all_op_names()
before, before_names = list(map(torch._C._dispatch_dump, ops)), names()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import amp_ext
assert list(map(torch._C._dispatch_dump, ops)) == before
assert [n.keys() for n in names()] == [n.keys() for n in before_names]
assert all(a[k] is b[k] for a, b in zip(names(), before_names) for k in b)
"""


def test_importing_changes_nothing_in_torch() -> None:
    """Importing amp_ext registers no op of torch and replaces no name."""
    subprocess.run([sys.executable, "-c", IMPORT_CHANGES_NOTHING], check=True)
