"""Test that warnings of amp_ext point at the program's line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import _cache, ops, verify
from amp_ext.compat.apex import amp, from_grad_scaler


def load_apex_states() -> None:
    state = {"scale": 4.0, "_growth_tracker": 0}
    amp.initialize(torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], 0.1), verbosity=0)
    amp.load_state_dict(from_grad_scaler(state, state))


def measure() -> None:
    with amp_ext.tune():
        ops.gemm(torch.ones(300, 40), torch.ones(40, 50))


def use_kernels() -> None:
    verify.may_run("none", "update_scale", "cpu", False)


CASES: dict[str, tuple[Callable[[], None], str]] = {
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
    monkeypatch.setattr(_cache, "append", lambda *_: True)
    yield
    verify._warned.clear()


@pytest.mark.parametrize("case", CASES)
def test_the_place_of_a_warning(case: str, faults: None) -> None:
    program, text = CASES[case]
    with pytest.warns(match=text) as warned:
        program()
    assert {Path(warning.filename).name for warning in warned} == {Path(__file__).name}
