"""Test that the PTX executor passes the hardware probes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from probe import nvcc, probes
from probe import run as probe
from probe.probes import Case
from ptx_backend import build

PTX = probe.DEVICES["ptx"]
pytestmark = pytest.mark.full
on_executor = pytest.mark.skipif(bool(build.missing()), reason=build.missing())


@on_executor
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", probe.PROBES)
def test_executor_agrees(name: str, seed: int) -> None:
    assert probe.check(name, PTX, seed) == ""


def test_every_function_has_its_expectation() -> None:
    text = "".join(source.read_text() for source in nvcc.SOURCES)
    assert set(re.findall(r"^int probe_(\w+)\(", text, re.MULTILINE)) == set(probe.PROBES)


@on_executor
def test_a_wrong_expectation_is_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def tma_reduce() -> Iterator[Case]:
        case = next(probes.tma_reduce())
        yield replace(case, expected=case.expected + (torch.arange(48) == 10))

    monkeypatch.setitem(probe.PROBES, "tma_reduce", tma_reduce)
    said = "tma_reduce(0, 0, 8): 32 of 1536 numbers differ, the first at 10: "
    assert probe.check("tma_reduce", PTX).startswith(said)


def test_forks_that_hang_or_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT", 1)
    assert probe.forked(str, "text") == "text"
    assert probe.forked(os._exit, 3) == "exit status 3"
    assert probe.forked(lambda: str(time.sleep(60))) == "no end within 1 s"
