"""Test the state of regions of amp_ext.autocast, in one thread and in several."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from autocast_cases import routed
from programs import run


def state() -> tuple[Any, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._is_any_autocast_enabled(),
    )


REGIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp16": {"dtype": torch.float16},
    "uncached": {"dtype": torch.bfloat16, "cache_enabled": False},
    "disabled": {"enabled": False},
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
def test_nesting(kinds: tuple[Any, Any], outer: str, inner: str) -> None:
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

    options = REGIONS[outer], REGIONS[inner]
    ours = seen(*(kind("cpu", **each) for kind, each in zip(kinds, options, strict=True)))
    theirs = seen(*(TORCHS("cpu", **each) for each in options))
    if kinds[1] is OURS:  # a region of torch does not reset the mark of ours
        assert [state for state, _ in ours] == [state for state, _ in theirs]
    is_ours = kinds[0] is OURS and outer != "disabled"
    within = inner != "disabled" and (kinds[1] is OURS or is_ours)
    assert [routes for _, routes in ours] == [False, *2 * [is_ours, within, is_ours, False]]


@pytest.mark.parametrize("within", [False, True], ids=["outside", "in-a-region"])
def test_region_that_cannot_be_entered_changes_nothing(within: bool) -> None:
    """A region that fails to enter leaves the state of autocast unchanged."""

    def enter() -> None:
        with amp_ext.autocast(**FP16, enabled=within):
            before = state(), routed()
            with pytest.raises(TypeError), amp_ext.autocast("cpu", enabled="yes"):
                pytest.fail("entered")
            assert (state(), routed()) == before

    with ThreadPoolExecutor(1) as thread:  # the thread's end also ends leftover regions
        thread.submit(enter).result()


def test_disabled_region_of_another_device_type() -> None:
    """A disabled region of another device type does not end the routing."""
    with amp_ext.autocast(**FP16), amp_ext.autocast("cuda", enabled=False):
        assert routed()


def test_each_call_of_a_decorated_function_has_a_region_of_its_own() -> None:
    """A decorated function may call itself and raise; a decorator enters a region of its class."""
    entered = []

    class Region(amp_ext.autocast):
        def __enter__(self) -> amp_ext.autocast:
            entered.append(self)
            return super().__enter__()

    @Region(**FP16)
    def visit(depth: int) -> list[bool]:
        """Documented."""
        if depth < 0:
            raise ValueError
        return [routed(), *(visit(depth - 1) if depth else []), routed()]

    before = state()
    assert visit(2) == 6 * [True]
    assert len({id(region) for region in entered}) == 3
    assert visit.__doc__ == "Documented."
    with pytest.raises(ValueError):
        visit(-1)
    assert (state(), routed()) == (before, False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_entered_region_is_a_region_of_its_own(duplicate: Any) -> None:
    """A program may enter a copy of a region within the original."""
    region = amp_ext.autocast(**FP16)
    with region:
        with duplicate(region):
            assert routed()
        assert routed()
    assert (routed(), torch.is_autocast_enabled("cpu")) == (False, False)


# ---- threads -------------------------------------------------------------------------------------


def test_threads_share_weights() -> None:
    """Each thread's gradient is right, and so is their sum in the shared weight."""
    weight = torch.randint(-3, 4, (4, 4)).float().requires_grad_()
    inputs = [torch.randint(-3, 4, (2, 4)).float() for _ in range(4)]

    def work(value: Tensor) -> None:
        for dtype in 10 * [torch.float16, torch.bfloat16]:
            with amp_ext.autocast("cpu", dtype):
                result = value @ weight
                torch.clear_autocast_cache()
                result = result + value @ weight
            result.sum().backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, inputs))
    expected = 2 * 20 * sum(inputs).sum(0)
    assert weight.grad.equal(expected[:, None].expand(4, 4))


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_no_thread_waits_for_ever(count: int) -> None:
    """Autocast holds no lock where Python code may run."""
    package = str(Path(amp_ext.__file__).parents[1])
    program = Path(__file__).with_name("threads_program.py")
    done = run(str(program), str(count), PYTHONPATH=package)
    assert done.returncode == 0, done.stderr
