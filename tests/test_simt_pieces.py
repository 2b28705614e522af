"""tests/simt: each function of the ptx headers does what it says, in every schedule."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executors import SIMT
from simt import build
from simt.library import Library, Schedule
from simt.sanitize import build_sanitized, sanitized

pytestmark = pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing)

SEEDS = range(9)
HALVES = (torch.float16, torch.bfloat16)


SOURCES = [build.HERE / name for name in ("pieces.cu", "pieces_sm90.cu")]


@cache
def library() -> Library:
    return Library(build.build(os.environ.get("AMP_EXT_SIMT", "plain"), "pieces", SOURCES))


def _converted(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.byref(argument)


def run(seed: int, name: str, *arguments: Any, resident: int = 8) -> None:
    """Launch a piece on tensors, numbers and structures; raise its report if it fails."""
    schedule = Schedule(seed, resident)
    error = library().call(f"piece_{name}", schedule, *map(_converted, arguments))
    assert error == 0, library().report()


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_votes(seed: int) -> None:
    values = torch.randint(0, 1000, (32,), dtype=torch.int32)
    seen = torch.zeros(32, 5, dtype=torch.int32)
    run(seed, "votes", values, seen)
    ballot = sum(1 << lane for lane in range(32) if values[lane] % 3 == 0)
    assert (seen[:, 0].long() & 0xFFFFFFFF == ballot).all()
    assert (seen[:, 1] == values.max()).all()
    neighbours = torch.arange(32, dtype=torch.int32) ^ 1
    assert torch.equal(seen[:, 2], values[neighbours.long()])
    assert torch.equal(seen[:, 3], neighbours)
    assert (seen[:, 4] == values[3]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(seed: int) -> None:
    values = torch.randint(0, 1000, (9, 32), dtype=torch.int32)
    received = torch.zeros_like(values)
    run(seed, "hand_over", values, received, len(values))
    assert torch.equal(received, values)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_take_turns(seed: int) -> None:
    blocks = 8
    turn, size = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    order = torch.full((blocks,), -1, dtype=torch.int32)
    run(seed, "turnstile", turn, size, order, blocks, resident=blocks)
    assert order.tolist() == list(range(blocks))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [0, 4, 16])
def test_cp_async(seed: int, count: int) -> None:
    values = torch.randint(0, 256, (7, 32, 16), dtype=torch.uint8)
    received = torch.zeros_like(values)
    run(seed, "pipeline", values, received, len(values), count)
    expected = values[:, torch.arange(32) ^ 1].clone()
    expected[-1, :, count:] = 0
    assert torch.equal(received, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ldmatrix_and_mma(dtype: torch.dtype, columns: bool, seed: int) -> None:
    a, b, d = integers(16, 16).to(dtype), integers(16, 8).to(dtype), torch.zeros(16, 8)
    stored = b.t().contiguous() if columns else b
    run(seed, "product", a, stored, d, int(dtype == torch.bfloat16), int(columns))
    assert torch.equal(d, a.float() @ b.float() + 1)


@pytest.mark.parametrize(
    ("variant", "files", "tests"),
    [
        ("portable", ("pieces", "sm90"), "[1] or 96-"),
        ("asan", ("pieces", "sm90"), "[1] or -1] or 96-"),
        ("tsan", ("pieces",), "[1] or [2] or -1]"),
    ],
)
def test_in_another_variant(variant: str, files: tuple[str, ...], tests: str) -> None:
    build_sanitized(variant, name="pieces", sources=SOURCES)
    here = Path(__file__).resolve().parent
    command = ("-m", "pytest", "-qsx", "-p", "no:cacheprovider", "-k", f"({tests}) and not variant")
    done = sanitized(variant, *command, *(str(here / f"test_simt_{name}.py") for name in files))
    assert done.returncode == 0, done.stdout + done.stderr
