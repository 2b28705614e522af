"""Test that the PTX executor passes the hardware probes, and how failed probes are reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import cuda_check
from probe import nvcc, tiles
from probe import run as probe
from probe.blocks import Case
from ptx_backend import build
from sass import Kernels, read_ptxas

PTX = probe.DEVICES["ptx"]
pytestmark = pytest.mark.full
on_executor = pytest.mark.skipif(bool(build.missing()), reason=build.missing())
with_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")


@on_executor
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in probe.PROBES if name not in probe.GPU_ALONE])
def test_executor_agrees(name: str, seed: int) -> None:
    assert probe.check(name, PTX, seed) == ""


@with_nvcc
def test_kernels_compile_for_hopper() -> None:
    _, log = nvcc.compile()
    kernels: Kernels = {}
    read_ptxas(log, kernels)
    assert len(kernels) > len(probe.PROBES)
    assert not any(kernel.spills for kernel in kernels.values())
    assert not cuda_check.remarks(log)


def test_every_function_has_its_expectation() -> None:
    text = "".join(source.read_text() for source in nvcc.SOURCES)
    assert set(re.findall(r"^int probe_(\w+)\(", text, re.MULTILINE)) == set(probe.PROBES)


@on_executor
def test_disagreements_are_reported(monkeypatch, capsys) -> None:
    """A wrong expectation, a fault of the executor and a GPU that differs are each named."""

    def tma_reduce() -> Iterator[Case]:
        case = next(tiles.tma_reduce())
        yield replace(case, expected=case.expected + (torch.arange(48) == 10))

    def tma_load() -> Iterator[Case]:
        case = next(tiles.tma_load())  # from column 3 of 16-bit elements, as an H100 refuses it
        yield replace(case, arguments=(*case.arguments[:3], 3, 0, 0))

    probes = {"tma_store": tiles.tma_store, "tma_reduce": tma_reduce, "tma_load": tma_load}
    for each in probes.values():
        each.__doc__ = "what it assumes"
    monkeypatch.setattr(probe, "PROBES", probes)
    monkeypatch.setattr(nvcc, "missing", lambda: "")
    monkeypatch.setattr(probe.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(probe.Cuda, "library", lambda self: None)
    monkeypatch.setattr(probe, "check_in_process", lambda name: "it hangs" * (name == "tma_load"))
    assert probe.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[-2:] for line in lines[3:6]]
    assert rows == [["ok", "ok"], ["DIFFERS", "ok"], ["DIFFERS", "DIFFERS"]]
    said = "\n".join(lines)
    assert "executor, tma_reduce(0, 0, 8): 32 of 1536 numbers differ, the first at 10: " in said
    assert "the first coordinate, 3, is not at" in said and "GPU, it hangs" in said
    assert lines[-1] == "3 of 6 probes agree"
