"""Test that warnings of amp_ext point at the program's line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import ops


def test_the_place_of_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning points at the program, behind frames of amp_ext and torch."""

    def broken(*_: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(sys.modules["amp_ext.tune"], "_right_candidates", broken)
    with pytest.warns(match="out of registers") as warned, amp_ext.tune():
        ops.gemm(torch.ones(300, 40), torch.ones(40, 50))
    assert {Path(warning.filename).name for warning in warned} == {Path(__file__).name}
