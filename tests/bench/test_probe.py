"""bench/gpu/probe.py: the executor agrees with the manual, and a disagreement is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import cuda_check
from gpu import probe
from gpu.probe_cases import Case, elect
from sass import Kernels, read_ptxas
from simt import build, nvcc

SIMT = probe.DEVICES["simt"]
on_executor = pytest.mark.skipif(bool(build.missing()), reason=build.missing())
with_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")


@on_executor
@pytest.mark.parametrize("name", probe.PROBES)
def test_executor_agrees(name: str) -> None:
    for seed in range(3):
        assert probe.check(name, SIMT, seed) == ""


@with_nvcc
@pytest.mark.full
def test_kernels_compile_for_hopper() -> None:
    _, log = nvcc.compile("probe", [probe.SOURCE], "90a")
    kernels: Kernels = {}
    read_ptxas(log, kernels)
    assert len(kernels) > len(probe.PROBES)
    assert not any(kernel.spills for kernel in kernels.values())
    assert not cuda_check.remarks(log)


def test_every_function_has_its_expectation() -> None:
    functions = re.findall(r"^int probe_(\w+)\(", probe.SOURCE.read_text(), re.MULTILINE)
    assert set(functions) == set(probe.PROBES)


@on_executor
def test_a_disagreement_is_told(monkeypatch, capsys) -> None:
    def wrong_elect() -> Iterator[Case]:
        """no lane is elected"""
        for case in elect():
            expected = case.expected.clone()
            expected[5, 0] = 0
            yield replace(case, expected=expected)

    monkeypatch.setattr(probe, "PROBES", {"elect": wrong_elect})
    assert probe.main(["--device", "simt"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("DIFFERS")
    assert lines[1:] == [
        "elect(): 1 of 192 numbers differ, the first at 15: 1, not 0",
        "0 of 1 probes agree",
    ]


def test_a_probe_that_hangs_or_dies_is_told(monkeypatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "false")
    assert probe.check_in_process("warp") == "warp: exit status 1"
    monkeypatch.setattr(probe, "LIMIT", 0.0)
    assert probe.check_in_process("warp") == "warp: no end within 0.0 s"
