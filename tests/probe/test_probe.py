"""Test that the PTX executor passes the hardware probes."""

from __future__ import annotations

import pytest

from probe import run
from ptx_backend import build


@pytest.mark.full
@pytest.mark.skipif(bool(build.missing()), reason=build.missing())
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", run.PROBES)
def test_executor_agrees(name: str, seed: int) -> None:
    assert run.check(name, seed=seed) == ""
