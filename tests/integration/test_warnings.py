"""Test that warnings of amp_ext point at the program's line."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import ops, verify


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="BF16 may have one candidate")
def test_the_place_of_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning points at the program, behind frames of amp_ext and torch."""

    def broken(*_: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(sys.modules["amp_ext.tune"], "_right_candidates", broken)
    with pytest.warns(match="out of registers") as warned, amp_ext.tune():
        ops.gemm(torch.ones(30, 40).bfloat16(), torch.ones(40, 50).bfloat16())
    failed = {"none update_scale": verify.Result("out of registers", "")}
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setattr(verify, "known", lambda device: failed)
    monkeypatch.setattr(verify, "_warned", set())
    with pytest.warns(match="cannot run on cpu: out of registers") as others:
        assert not verify.may_run("none", "update_scale", "cpu", False)
    assert {Path(w.filename).name for w in (*warned, *others)} == {Path(__file__).name}
