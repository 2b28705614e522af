"""Test amp_ext.cuda.amp and amp_ext.cpu.amp: torch's names without their deprecation."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext

FP16 = torch.float16
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
PAIRS = {"cuda": (amp_ext.cuda.amp, torch.cuda.amp), "cpu": (amp_ext.cpu.amp, torch.cpu.amp)}
every_pair = pytest.mark.parametrize(("ours", "torchs"), PAIRS.values(), ids=PAIRS)


def assert_same_interface(ours: Callable[..., Any], torchs: Callable[..., Any]) -> None:
    """Assert the same name and arguments, apart from our options."""
    assert ours.__name__ == torchs.__name__
    mine, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ours, torchs)
    )
    assert [argument for argument in mine if argument[1] is not VAR_KEYWORD] == expected


@every_pair
def test_names_and_arguments(ours: Any, torchs: Any) -> None:
    """The names and arguments are torch's."""
    names = set(getattr(torchs, "__all__", ["GradScaler", "autocast"]))
    assert set(ours.__all__) == names
    for name in names:
        assert_same_interface(getattr(ours, name), getattr(torchs, name))


def test_interface_of_autocast() -> None:
    """amp_ext.autocast has the arguments and errors of torch.autocast, and torch's functions."""
    assert_same_interface(amp_ext.autocast, torch.autocast)
    for function in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        assert getattr(amp_ext, function) is getattr(torch.amp, function)
    with pytest.raises(RuntimeError, match=r"device type.*: nonsense"):
        amp_ext.autocast("nonsense")


@every_pair
def test_disable_themselves_as_torchs(ours: Any, torchs: Any) -> None:
    """Regions and scalers have torch's states and warnings: "cuda" is disabled without a GPU."""
    results = []
    for package in (ours, torchs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler, region = package.GradScaler(4.0), package.autocast(True, torch.bfloat16, False)
            with region:
                enabled = [torch.is_autocast_enabled(device_type) for device_type in PAIRS]
        said = {(w.category, str(w.message)) for w in caught if w.category is not FutureWarning}
        attributes = region.device, region.fast_dtype, region._enabled, region._cache_enabled
        results.append((said, scaler.is_enabled(), enabled, attributes, hasattr(region, "other")))
    assert results[0] == results[1]


def enters(x: Tensor, weight: Tensor) -> Tensor:
    with amp_ext.cpu.amp.autocast(dtype=FP16):
        return F.linear(x, weight)


ways = {
    "eager": enters,
    "decorated": amp_ext.cpu.amp.autocast(True, FP16)(F.linear),
    "compiled": torch.compile(enters, backend="aot_eager", fullgraph=True),
}


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("run", ways.values(), ids=ways)
def test_region_of_the_cpu_is_ours(run: Callable[..., Tensor]) -> None:
    """A region of the CPU is amp_ext's, unwarned: 2 x 61440 = 122880 exceeds the 65504 of FP16."""
    torch._dynamo.reset()
    weight = torch.ones(3, 4, requires_grad=True)
    result = run(torch.ones(2, 4), weight)
    assert result.dtype == FP16
    result.backward(torch.full_like(result, 61440.0))
    assert weight.grad.eq(122880.0).all()


def test_decorators_of_autograd_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are torch.amp's for "cuda"."""
    for name in ("custom_fwd", "custom_bwd"):
        monkeypatch.setattr(torch.amp, name, lambda *args, **options: (args, options))
    fwd, bwd = amp_ext.cuda.amp.custom_fwd, amp_ext.cuda.amp.custom_bwd
    wide = {"device_type": "cuda", "cast_inputs": torch.float32}
    assert fwd(print) == ((print,), {"device_type": "cuda", "cast_inputs": None})
    assert fwd(cast_inputs=torch.float32) == ((None,), wide)
    assert bwd(print) == ((print,), {"device_type": "cuda"})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.cuda.amp.GradScaler is enabled")
@every_pair
def test_scaler(ours: Any, torchs: Any) -> None:
    """The scaler has amp_ext's options, is an instance of torch's class, and survives a pickle.

    It is made without torch's warning that the name is deprecated.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        scaler = ours.GradScaler(4.0, growth_interval=7, hysteresis=3)
    assert isinstance(scaler, amp_ext.GradScaler) and isinstance(scaler, torchs.GradScaler)
    again = pickle.loads(pickle.dumps(scaler))
    assert type(again) is ours.GradScaler
    assert again.state_dict() == torchs.GradScaler(4.0, growth_interval=7).state_dict()
    assert again._hysteresis == 3
    with pytest.raises(TypeError, match="histeresis"):
        ours.GradScaler(histeresis=3)
