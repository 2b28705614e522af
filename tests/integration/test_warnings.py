"""Test that warnings point at the program's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import _cache, _warnings, ops, verify
from amp_ext.compat.apex import amp, from_grad_scaler


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_warnings, "_regions", {})


def enter(region: Any) -> None:
    with region:
        assert not torch.is_autocast_enabled("cuda")


def call(function: Callable[[], None]) -> None:
    """Call a function within a region, as its decorator."""
    amp_ext.autocast("cuda", torch.bfloat16)(function)()


def load_apex_states() -> None:
    state = {"scale": 4.0, "_growth_tracker": 0}
    amp.initialize(torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], 0.1), verbosity=0)
    amp.load_state_dict(from_grad_scaler(state, state))


def measure() -> None:
    with amp_ext.tune():
        ops.gemm(torch.ones(300, 40), torch.ones(40, 50))


def use_kernels() -> None:
    verify.may_run("none", "update_scale", "cpu", False)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "GradScaler": (lambda: amp_ext.GradScaler(), "CUDA is not available"),
    "cuda.amp.GradScaler": (lambda: amp_ext.cuda.amp.GradScaler(), "CUDA is not available"),
    "autocast": (lambda: enter(amp_ext.autocast("cuda")), "CUDA is not available"),
    "cuda.amp.autocast": (lambda: enter(amp_ext.cuda.amp.autocast()), "CUDA is not available"),
    "a decorator": (lambda: call(lambda: None), "CUDA is not available"),
    "a dtype": (
        lambda: enter(amp_ext.autocast("cpu", torch.float32)),
        "CPU autocast only supports|not supported",
    ),
    "load_state_dict": (load_apex_states, "the state is of 2 losses"),
    "tune": (measure, "out of registers"),
    "verification": (use_kernels, "cannot run on cpu: out of registers"),
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make tune and verification warn."""

    def broken(*_: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setattr(sys.modules["amp_ext.tune"], "_right_candidates", broken)
    failed = {"none update_scale": verify.Result("out of registers", "")}
    monkeypatch.setattr(verify, "known", lambda device: failed)
    monkeypatch.setattr(_cache, "update", lambda *_: True)
    yield
    verify._warned.clear()


@pytest.mark.parametrize("case", CASES)
def test_the_place_of_a_warning(case: str, faults: None) -> None:
    program, text = CASES[case]
    with pytest.warns(match=text) as warned:
        program()
    assert {Path(warning.filename).name for warning in warned} == {Path(__file__).name}


def test_a_warning_of_a_loop_is_shown_once() -> None:
    """A warning in a loop is shown once, and so are a program's own warnings."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        amp_ext.autocast("cuda", torch.float16)
        for _ in range(3):
            amp_ext.autocast("cuda", torch.float16)
            warnings.warn("the program's own", stacklevel=1)
    assert [str(warning.message)[:20] for warning in shown].count("the program's own") == 1
    assert len(shown) == 3


def test_another_warning_disables_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that torch enables with a warning is enabled."""
    construct = torch.autocast.__init__

    def warn_and_construct(region: Any, *args: Any, **kwargs: Any) -> None:
        warnings.warn("the device is old", stacklevel=2)
        construct(region, *args, **kwargs)

    monkeypatch.setattr(torch.autocast, "__init__", warn_and_construct)
    with pytest.warns(match="the device is old"):
        region = amp_ext.autocast("cpu", torch.bfloat16)
    with region:
        assert torch.is_autocast_enabled("cpu")


def test_a_warning_that_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="CUDA is not available"):
            amp_ext.autocast("cuda")
        with pytest.raises(UserWarning, match="CUDA is not available"):
            amp_ext.GradScaler()
