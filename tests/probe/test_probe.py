"""Test the hardware probe on the executor, and its report of a fault."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import cuda_check
import nvcc
from probe import run as probe
from probe.blocks import Case, elect, warp
from probe.tiles import tma_load
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
    _, log = nvcc.compile("probe", probe.SOURCES, "90a")
    kernels: Kernels = {}
    read_ptxas(log, kernels)
    assert len(kernels) > len(probe.PROBES)
    assert not any(kernel.spills for kernel in kernels.values())
    assert not cuda_check.remarks(log)


def test_every_function_has_its_expectation() -> None:
    text = "".join(source.read_text() for source in probe.SOURCES)
    assert set(re.findall(r"^int probe_(\w+)\(", text, re.MULTILINE)) == set(probe.PROBES)


def test_the_table_is_not_too_wide() -> None:
    for name, function in probe.PROBES.items():
        assert len(probe.ROW.format(name, function.__doc__, "DIFFERS", "DIFFERS")) <= 100
        assert probe.ROW.format(name, function.__doc__, "", "").endswith("  ")


# ---- faults ------------------------------------------------------------------------------------


def wrong_elect() -> Iterator[Case]:
    """two lanes are elected"""
    for case in elect():
        expected = case.expected.clone()
        expected[5, 0] = 2
        yield replace(case, expected=expected)


@pytest.fixture
def two_probes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Iterator[Case]]]:
    """Only two probes, and no GPU."""
    chosen = {"warp": warp, "elect": elect}
    monkeypatch.setattr(probe, "PROBES", chosen)
    monkeypatch.setattr(nvcc, "missing", lambda arch: "a test hides it")
    return chosen


@on_executor
def test_the_table(two_probes, capsys) -> None:
    assert probe.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["executor: tests/cudasim", "GPU: none, a test hides it"]
    assert [line.split()[0] for line in lines[2:5]] == ["probe", "warp", "elect"]
    assert [line.split()[-2:] for line in lines[3:5]] == [["ok", "none"]] * 2
    assert lines[5:] == ["2 of 2 probes agree"]


def test_of_one_device_alone(two_probes, monkeypatch, capsys) -> None:
    monkeypatch.setattr(nvcc, "missing", lambda arch: "")
    monkeypatch.setattr(probe.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(probe.Cuda, "library", lambda self: None)
    monkeypatch.setattr(probe, "check_in_process", lambda name: "")
    assert probe.main(["--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["executor: none, not asked for", "GPU: a GPU"]
    assert [line.split()[-2:] for line in lines[3:5]] == [["none", "ok"]] * 2


WRONG = "elect(): 1 of 128 numbers differ, the first at 10: 1, not 2"


@on_executor
def test_a_wrong_expectation_fails(two_probes, monkeypatch, capsys) -> None:
    monkeypatch.setitem(two_probes, "elect", wrong_elect)
    assert probe.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[-2:] == ["DIFFERS", "none"]
    assert lines[5:] == [f"executor, {WRONG}", "1 of 2 probes agree"]


@on_executor
def test_columns_between_16_bytes_are_a_fault(monkeypatch) -> None:
    """A TMA load from column 3 of 16-bit elements, which an H100 refuses, is reported."""

    def at_column_3() -> Iterator[Case]:
        case = next(tma_load())
        yield replace(case, arguments=(*case.arguments[:3], 3, 0, 0))

    monkeypatch.setitem(probe.PROBES, "tma_load", at_column_3)
    assert "the first coordinate, 3, is not at" in probe.check("tma_load", PTX)


@on_executor
def test_the_gpu_has_its_column(two_probes, monkeypatch, capsys) -> None:
    monkeypatch.setattr(nvcc, "missing", lambda arch: "")
    monkeypatch.setattr(probe.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(probe.Cuda, "library", lambda self: None)
    monkeypatch.setattr(probe, "check_in_process", {"warp": "", "elect": WRONG}.get)
    assert probe.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "GPU: a GPU"
    assert [line.split()[-2:] for line in lines[3:5]] == [["ok", "ok"], ["ok", "DIFFERS"]]
    assert lines[5:] == [f"GPU, {WRONG}", "3 of 4 probes agree"]


@on_executor
def test_a_failed_build_leaves_the_other_device(two_probes, monkeypatch, capsys) -> None:
    def fail(self) -> None:
        raise RuntimeError("nvcc said no")

    monkeypatch.setattr(nvcc, "missing", lambda arch: "")
    monkeypatch.setattr(probe.Cuda, "library", fail)
    assert probe.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "GPU: none, its build failed"
    assert [line.split()[-2:] for line in lines[3:5]] == [["ok", "none"]] * 2
    assert lines[5:] == ["nvcc said no", "2 of 2 probes agree"]


def test_a_probe_that_hangs_or_dies_is_told(monkeypatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "false")
    assert probe.check_in_process("warp") == "warp: exit status 1"
    monkeypatch.setattr(probe, "LIMIT", 0.0)
    assert probe.check_in_process("warp") == "warp: no end within 0.0 s"


@on_executor
def test_command_line() -> None:
    command = [sys.executable, probe.__file__, "--probe", "warp"]
    done = subprocess.run([*command, "--device", "ptx"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "warp: ok\n"), done.stderr
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--probe needs --device" in done.stderr
